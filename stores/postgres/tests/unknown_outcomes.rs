//! Requests that their callers abandoned while the server was unreachable: the store releases them when the server is reachable again, though the
//! process lives on and waits in another queue.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{try_open, url};
use futures_util::FutureExt;
use lockkeeper_core::{Error, Store, Wait};
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
