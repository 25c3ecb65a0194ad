//! Requests that their callers abandoned while the server was unreachable: the store releases them when the server is reachable again, though the
//! process lives on and waits in another queue.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{number, sql, try_open, url};
use futures_util::FutureExt;
use lockkeeper_core::{Error, Store, Wait};
use lockkeeper_postgres::{Options, connect_to};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, queue_reaches, request, take, with,
};
use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// A server, a client behind a proxy, and one with a direct connection.
async fn set_up() -> Option<(Server, Proxy, Arc<dyn Store>, Arc<dyn Store>)> {
    let server = servers::postgres(PostgresOptions::default()).ok()?;
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let open = async |addr| try_open(&format!("{}?timeout=1s&poll=100ms", url(addr))).await.unwrap();
    let (store, other) = (open(proxy.addr()).await, open(server.addr()).await);
    Some((server, proxy, store, other))
}

/// The wait ended while the server was unreachable. The caller got Unavailable, and no task removed the queue entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_while_the_server_is_unreachable_leaves_no_queue_entry() {
    let Some((_server, proxy, store, other)) = set_up().await else { return };
    let elsewhere = take(&other, &request("elsewhere")).await;
    let waits = join_queue(&store, &request("elsewhere"), 1).await;
    let held = take(&other, &request("x")).await;
    let patient = with(request("x"), |request| request.wait = Wait::For(Duration::from_secs(2)));
    let away = async {
        queue_reaches(&other, &name("x"), 1).await;
        proxy.cut_all();
    };
    let (told, ()) = tokio::join!(store.acquire(&patient), away);
    assert!(
        matches!(told, Err(Error::Unavailable(_) | Error::Unknown(_))),
        "the server is unreachable: {told:?}"
    );
    proxy.heal();
    queue_reaches(&other, &name("x"), 0).await;
    give_back(&other, &held.key).await;
    is_free(&other, "x").await;
    give_back(&other, &elsewhere.key).await;
    give_back(&store, &granted(waits).await.key).await;
}

/// A caller may abandon its release before the reply, or before it is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_release_is_done_in_the_end() {
    let Some((_server, proxy, store, other)) = set_up().await else { return };
    let (held, next) = (take(&store, &request("x")).await, take(&store, &request("y")).await);
    proxy.hold(Direction::Requests);
    let before = proxy.count().requests;
    let mut sent = Box::pin(store.release(&held.key));
    assert!((&mut sent).now_or_never().is_none(), "no reply can have come");
    eventually("it is on its way", || async { proxy.count().requests > before }).await;
    let mut behind = Box::pin(store.release(&next.key));
    assert!((&mut behind).now_or_never().is_none(), "no reply can have come");
    drop((sent, behind));
    proxy.cut_all();
    proxy.heal();
    is_free(&other, "x").await;
    is_free(&other, "y").await;
}

/// A statement that waits in the database sees the epochs of the moment when it began. Its caller has gone, its connection is lost and another one
/// confirms the release; then the statement goes on and grants the lock to no holder. Such a request was released once only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_after_the_release_of_a_dropped_request_is_released_too() {
    let Some((server, proxy, store, other)) = set_up().await else { return };
    let blocker = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    // The fast path applies only while the counter is ahead of the clock.
    sql(&server, "SELECT setval('lockkeeper.fence', lockkeeper.now_us() + 600000000)");
    // PostgreSQL runs the statement for twice the timeout at most: on a busy machine it may have ended too early to show anything.
    let mut round = 0;
    let late = loop {
        round += 1;
        let dropped = request(&format!("late/{round}"));
        blocker.batch_execute("BEGIN; ALTER SEQUENCE lockkeeper.fence CACHE 1").await.unwrap();
        let (store2, request2) = (store.clone(), dropped.clone());
        let caller = tokio::spawn(async move { store2.acquire(&request2).await });
        eventually("it waits for the sequence, or has failed", || async {
            number(&server, waiting) > 0 || caller.is_finished()
        })
        .await;
        caller.abort();
        _ = caller.await;
        proxy.cut_all();
        proxy.heal();
        eventually("it is released", || async { store.release(&dropped.key).await.is_ok() }).await;
        blocker.batch_execute("COMMIT").await.unwrap();
        eventually("its statement has ended", || async { number(&server, waiting) == 0 }).await;
        if other.inspect(dropped.key.names.first()).await.unwrap().is_some() {
            break dropped;
        }
        assert!(round < 20, "no statement outlived its connection");
    };
    is_free(&other, late.key.names.first().as_str()).await;
}
