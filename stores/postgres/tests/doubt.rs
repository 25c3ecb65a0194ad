//! What nobody wants any more, while the server is away: it is taken back when the server is there again, though the process lives on
//! and stands in another line.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{try_open, url};
use futures_util::FutureExt;
use lockkeeper_core::{Error, Store, Wait};
use lockkeeper_testkit::laws::{
    ask, eventually, give_back, granted, in_line, is_free, name, stand_in_line, take, with,
};
use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// A server, a client behind a proxy, and one that talks past it.
async fn set_up() -> Option<(Server, Proxy, Arc<dyn Store>, Arc<dyn Store>)> {
    let server = servers::postgres(PostgresOptions::default()).ok()?;
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let open = async |addr| try_open(&format!("{}?timeout=1s&poll=100ms", url(addr))).await.unwrap();
    let (store, other) = (open(proxy.addr()).await, open(server.addr()).await);
    Some((server, proxy, store, other))
}

/// The wait ended while nobody was there to be told. The answer was that nothing had happened, and nobody took the place back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_while_the_server_is_away_leaves_no_place_in_line() {
    let Some((_server, proxy, store, other)) = set_up().await else { return };
    let elsewhere = take(&other, &ask("elsewhere")).await;
    let waits = stand_in_line(&store, &ask("elsewhere"), 1).await;
    let held = take(&other, &ask("x")).await;
    let patient = with(ask("x"), |ask| ask.wait = Wait::For(Duration::from_secs(2)));
    let away = async {
        in_line(&other, &name("x"), 1).await;
        proxy.cut_all();
    };
    let (told, ()) = tokio::join!(store.acquire(&patient), away);
    assert!(matches!(told, Err(Error::Unavailable(_) | Error::Unknown(_))), "nobody is there: {told:?}");
    proxy.heal();
    in_line(&other, &name("x"), 0).await;
    give_back(&other, &held.claim).await;
    is_free(&other, "x").await;
    give_back(&other, &elsewhere.claim).await;
    give_back(&store, &granted(waits).await.claim).await;
}

/// Whoever gives back may lose patience before it is answered, or even sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_nobody_waits_for_is_done_in_the_end() {
    let Some((_server, proxy, store, other)) = set_up().await else { return };
    let (held, next) = (take(&store, &ask("x")).await, take(&store, &ask("y")).await);
    proxy.hold(Direction::Requests);
    let before = proxy.count().requests;
    let mut sent = Box::pin(store.release(&held.claim));
    assert!((&mut sent).now_or_never().is_none(), "nobody can have answered");
    eventually("it is on its way", || async { proxy.count().requests > before }).await;
    let mut behind = Box::pin(store.release(&next.claim));
    assert!((&mut behind).now_or_never().is_none(), "nobody can have answered");
    drop((sent, behind));
    proxy.cut_all();
    proxy.heal();
    is_free(&other, "x").await;
    is_free(&other, "y").await;
}
