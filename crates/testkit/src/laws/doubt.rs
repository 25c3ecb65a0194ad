//! An ask that may have happened, and a store that is away when it is asked again.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper::{Error, Lockkeeper};
use lockkeeper_core::{Ask, LockName, Store, Wait};
use lockkeeper_host::SystemClock;

use super::{
    SHORT, ask, eventually, give_back, granted, in_line, name, refused, soon, stand_in_line, take, with,
};
use crate::proxy::{Direction, Proxy};

const TTL: Duration = Duration::from_secs(2);

/// `store` talks through the proxy, `other` past it. An ask stands in line and is not told so; then nobody is there to be asked again.
/// Whoever asked is not told that nothing has happened, and what has happened does not stay: neither if the library asks, nor if
/// somebody does who leaves it at that. The process lives on meanwhile, and stands in another line.
pub async fn an_ask_in_doubt_leaves_nothing(proxy: &Proxy, store: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    let elsewhere = take(other, &ask("elsewhere")).await;
    let waits = stand_in_line(store, &ask("elsewhere"), 1).await;
    for library in [false, true] {
        let text = format!("doubt/{library}");
        let held = take(other, &ask(&text)).await;
        let doubted = with(ask(&text), |ask| ask.ttl = TTL);
        // What it needs beside the place in line is there, and somebody is known to be in the way.
        refused(store, &with(ask(&text), |ask| ask.ttl = TTL)).await;
        let told = match library {
            true => by_library(proxy, store, other, &doubted).await,
            false => by_hand(proxy, store, other, &doubted).await,
        };
        assert!(matches!(told, Error::Unknown(_)), "it stands in line, and is told: {told}");
        proxy.heal();
        let line = name(&text);
        eventually("the place in line is given up", || async { waiting(other, &line).await == 0 }).await;
        give_back(other, &held.claim).await;
        let next = take(other, &ask(&text)).await;
        give_back(other, &next.claim).await;
    }
    give_back(other, &elsewhere.claim).await;
    give_back(store, &granted(waits).await.claim).await;
}

/// `store` talks through the proxy, `other` past it. Whoever stands in line goes away while nobody is there to be told, and stays away for
/// longer than the library tries to give its place back. Once the store is there again the place is given up, by the process that
/// lives on, and stands in another line.
pub async fn a_release_that_was_given_up_leaves_nothing(
    proxy: &Proxy,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let elsewhere = take(other, &ask("elsewhere")).await;
    let waits = stand_in_line(store, &ask("elsewhere"), 1).await;
    let (text, line) = ("given/up", name("given/up"));
    let held = take(other, &ask(text)).await;
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    let keeper2 = keeper.clone();
    let asks = tokio::spawn(async move { keeper2.lock(text).ttl(SHORT).acquire().await.map(drop) });
    in_line(other, &line, 1).await;
    proxy.cut_all();
    asks.abort();
    assert!(asks.await.is_err_and(|end| end.is_cancelled()), "nobody has let it in");
    // It is over when the library has given up, because nobody can have heard of it.
    soon("the library gives up", keeper.settle()).await;
    proxy.heal();
    eventually("the place in line is given up", || async { waiting(other, &line).await == 0 }).await;
    give_back(other, &held.claim).await;
    let next = take(other, &ask(text)).await;
    give_back(other, &next.claim).await;
    give_back(other, &elsewhere.claim).await;
    give_back(store, &granted(waits).await.claim).await;
}

/// Until it stands in line; nobody is told anything from here on.
async fn arrives(proxy: &Proxy, other: &Arc<dyn Store>, ask: &Ask) {
    in_line(other, ask.claim.names.first(), 1).await;
    proxy.cut_all();
}

async fn by_hand(proxy: &Proxy, store: &Arc<dyn Store>, other: &Arc<dyn Store>, ask: &Ask) -> Error {
    let ask = with(ask.clone(), |ask| ask.wait = Wait::Forever);
    proxy.hold(Direction::Replies);
    let (first, ()) = tokio::join!(store.acquire(&ask), arrives(proxy, other, &ask));
    let again = soon("an answer", store.acquire(&ask)).await;
    assert!(matches!(again, Err(Error::Unavailable(_) | Error::Unknown(_))), "nobody is there: {again:?}");
    first.expect_err("nobody has answered")
}

async fn by_library(proxy: &Proxy, store: &Arc<dyn Store>, other: &Arc<dyn Store>, ask: &Ask) -> Error {
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    proxy.hold(Direction::Replies);
    let asked = keeper.lock(ask.claim.names.first().as_str()).ttl(ask.ttl).acquire();
    let (told, ()) = tokio::join!(asked, arrives(proxy, other, ask));
    told.expect_err("nobody has answered")
}

async fn waiting(store: &Arc<dyn Store>, name: &LockName) -> usize {
    store.inspect(name).await.expect("inspect works").map_or(0, |view| view.waiting)
}
