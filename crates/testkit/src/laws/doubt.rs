//! Requests and releases that may have happened, or that arrive late, and a store that is unreachable when they are sent again.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper::{Error, Lockkeeper};
use lockkeeper_core::{Ask, LockName, Store, Wait};
use lockkeeper_host::SystemClock;

use super::{
    LONG, SHORT, ask, eventually, give_back, granted, in_line, is_free, name, refused, soon, stand_in_line,
    take, with,
};
use crate::proxy::{Direction, Fault, Proxy};

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

/// A store that is unreachable for a while, for some of its clients.
pub trait Outage {
    /// From now on every call of these clients fails.
    fn begin(&self);
    /// The store is reachable again.
    fn end(&self);
}

impl Outage for Proxy {
    fn begin(&self) {
        self.cut_all();
    }

    fn end(&self) {
        self.heal();
    }
}

/// `outage` is that of `store`, not of `other`. A caller stops waiting while the store is unreachable, and the store stays unreachable for longer
/// than the ttl. When the store is reachable again, the process that lives on removes the queue entry: the waiter behind it gets the lock
/// as soon as the holder releases it. The process waits for another lock meanwhile.
pub async fn a_release_that_was_given_up_leaves_nothing(
    outage: &impl Outage,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let elsewhere = take(other, &ask("elsewhere")).await;
    let waits = stand_in_line(store, &ask("elsewhere"), 1).await;
    let (text, queue) = ("given/up", name("given/up"));
    let held = take(other, &ask(text)).await;
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    let keeper2 = keeper.clone();
    let asks = tokio::spawn(async move { keeper2.lock(text).ttl(SHORT).acquire().await.map(drop) });
    in_line(other, &queue, 1).await;
    let behind = stand_in_line(other, &ask(text), 2).await;
    outage.begin();
    asks.abort();
    assert!(asks.await.is_err_and(|end| end.is_cancelled()), "nobody has let it in");
    soon("the release has failed for a ttl", keeper.settle()).await;
    outage.end();
    eventually("the queue entry is removed", || async { waiting(other, &queue).await == 1 }).await;
    give_back(other, &held.claim).await;
    give_back(other, &granted(behind).await.claim).await;
    is_free(other, text).await;
    give_back(other, &elsewhere.claim).await;
    give_back(store, &granted(waits).await.claim).await;
}

/// `outage` is that of `store`, not of `other`. A wait ends while the store is unreachable, and the request is queued: its caller is not
/// told that nothing has happened. Once the store is reachable again the queue entry is removed, though its ttl is long, and the waiter
/// behind it gets the lock. Both for a caller of the library and for one of the store itself.
pub async fn a_wait_that_ends_during_an_outage_leaves_nothing(
    outage: &impl Outage,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let elsewhere = take(other, &ask("elsewhere")).await;
    let waits = stand_in_line(store, &ask("elsewhere"), 1).await;
    for library in [false, true] {
        let text = format!("outage/{library}");
        let queue = name(&text);
        let held = take(other, &ask(&text)).await;
        let asked = with(ask(&text), |ask| ask.wait = Wait::For(TTL));
        let (store2, text2) = (store.clone(), text.clone());
        let asks = tokio::spawn(async move {
            match library {
                true => {
                    let keeper = Lockkeeper::with_store(store2, Arc::new(SystemClock));
                    let told = keeper.lock(text2).ttl(LONG).wait(TTL).acquire().await.map(drop);
                    // The keeper lives on with the process.
                    (told, Some(keeper))
                }
                false => (store2.acquire(&asked).await.map(drop), None),
            }
        });
        in_line(other, &queue, 1).await;
        let behind = stand_in_line(other, &ask(&text), 2).await;
        outage.begin();
        let (told, keeper) = soon("the wait ends", asks).await.expect("the caller ends well");
        assert!(
            matches!(told, Err(Error::Unknown(_))),
            "the request is queued, and its caller is told: {told:?}"
        );
        outage.end();
        eventually("the queue entry is removed", || async { waiting(other, &queue).await == 1 }).await;
        give_back(other, &held.claim).await;
        give_back(other, &granted(behind).await.claim).await;
        is_free(other, &text).await;
        drop(keeper);
        eventually("the store is reachable", || async { store.inspect(&queue).await.is_ok() }).await;
    }
    give_back(other, &elsewhere.claim).await;
    give_back(store, &granted(waits).await.claim).await;
}

/// `store` talks through the proxy, `other` past it. The network delays a request until after its caller has released it. It is
/// delivered then, and the lock stays with nobody: neither granted for a long ttl nor queued. Returns whether the server answered the late
/// request: a server may also notice that its client has gone.
pub async fn a_request_that_arrives_after_its_release_takes_nothing(
    proxy: &Proxy,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) -> bool {
    let mut arrived = true;
    for queued in [false, true] {
        let text = format!("late/{queued}");
        let held = if queued { Some(take(other, &ask(&text)).await) } else { None };
        let asked = with(ask(&text), |ask| ask.wait = if queued { Wait::Forever } else { Wait::No });
        let late = proxy.inject(Fault::at_request(1).hold());
        let told = soon("an answer", store.acquire(&asked)).await;
        assert!(matches!(told, Err(Error::Unknown(_))) && late.fired(), "{told:?}");
        soon("the request is released", async {
            while let Err(error) = store.release(&asked.claim).await {
                assert!(matches!(error, Error::Unknown(_) | Error::Unavailable(_)), "{error}");
            }
        })
        .await;
        let before = proxy.count().replies;
        late.release();
        let answered = eventually("it is answered", || async { proxy.count().replies > before });
        arrived &= tokio::time::timeout(TTL, answered).await.is_ok();
        if let Some(held) = held {
            eventually("no queue entry stays", || async { waiting(other, &name(&text)).await == 0 }).await;
            give_back(other, &held.claim).await;
        }
        is_free(other, &text).await;
    }
    arrived
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
