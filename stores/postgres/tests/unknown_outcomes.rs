//! Requests that their callers abandoned while the server was unreachable: the store releases them when the server is reachable again, though the
//! process lives on and waits in another queue.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{number, sql, try_open, url};
use futures_util::FutureExt;
use lockkeeper_core::{Error, LockRequest, Store, Wait};
use lockkeeper_postgres::{Options, connect_to};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, queue_reaches, refused, request, soon, take,
    with,
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

/// Makes the first insert into the lock table wait for an advisory lock, in spite of `statement_timeout` and of cancellations: behind a pooler
/// a cancellation may be lost.
const STALL_THE_FIRST_INSERT: &str = "CREATE SEQUENCE lockkeeper.inserts; \
     CREATE FUNCTION lockkeeper.stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
       IF nextval('lockkeeper.inserts') = 1 THEN LOOP \
         BEGIN PERFORM pg_advisory_xact_lock_shared(77); EXIT; EXCEPTION WHEN query_canceled THEN END; \
       END LOOP; END IF; RETURN NEW; END $$; \
     CREATE TRIGGER stall BEFORE INSERT ON lockkeeper.lock FOR EACH ROW EXECUTE FUNCTION lockkeeper.stall(); \
     SELECT setval('lockkeeper.fence', lockkeeper.now_us() + 600000000)";

/// The acquire of `late` stalls in PostgreSQL, and its caller gets `Unknown`. After `then` PostgreSQL carries out the acquire: no caller uses the
/// grant, so the store has to release it.
async fn a_stalled_acquire_is_released_after<F: Future<Output = ()>>(
    then: impl FnOnce(Arc<dyn Store>, Arc<dyn Store>, LockRequest) -> F,
) {
    let Some((server, proxy, store, other)) = set_up().await else { return };
    sql(&server, STALL_THE_FIRST_INSERT);
    let blocker = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    blocker.batch_execute("SELECT pg_advisory_lock(77)").await.unwrap();
    let late = request("late");
    let (first, asked) = (store.clone(), late.clone());
    let first = tokio::spawn(async move { first.acquire(&asked).await });
    let stalled = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND NOT granted";
    eventually("it stalls", || async { number(&server, stalled) == 1 }).await;
    proxy.cut_all();
    proxy.heal();
    let told = soon("its caller has an answer", first).await.unwrap();
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    then(store.clone(), other.clone(), late.clone()).await;
    assert_eq!(number(&server, stalled), 1, "it still stalls");
    blocker.batch_execute("SELECT pg_advisory_unlock(77)").await.unwrap();
    let view = "SELECT count(*) FROM lockkeeper.lock WHERE name = 'late' AND attempt IS NOT NULL";
    eventually("it is carried out", || async { number(&server, view) == 1 }).await;
    is_free(&other, "late").await;
}

/// The retry was granted and released. The store no longer knew that an earlier call of this attempt had no reply, so it released once only, and the
/// lock was held for no process for a whole ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_after_the_release_of_a_retry_is_released_too() {
    a_stalled_acquire_is_released_after(|store, _, late| async move {
        take(&store, &late).await;
        give_back(&store, &late.key).await;
    })
    .await;
}

/// The caller of a retry that found the lock busy has nothing to release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_after_a_busy_retry_is_released_too() {
    a_stalled_acquire_is_released_after(|store, other, late| async move {
        let held = take(&other, &request("late")).await;
        refused(&store, &late).await;
        give_back(&other, &held.key).await;
    })
    .await;
}

/// Only the release that the store sends at the end of that time proves anything: the caller's own second release used to take its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_release_by_the_caller_does_not_count() {
    a_stalled_acquire_is_released_after(|store, _, late| async move {
        give_back(&store, &late.key).await;
        give_back(&store, &late.key).await;
    })
    .await;
}
