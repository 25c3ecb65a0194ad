//! Requests and releases that may have happened, or that arrive late, and a store that is unreachable when they are sent again.

mod late_request;

pub use late_request::*;

use std::sync::Arc;
use std::time::Duration;

use lockkeeper::{Error, Lockkeeper};
use lockkeeper_core::{
    AcquireOutcome, LockName, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey, Store, Wait,
};
use lockkeeper_host::SystemClock;

use super::{
    LONG, SHORT, eventually, give_back, granted, is_free, join_queue, name, polls, queue_reaches, refused,
    request, soon, take, with,
};
use crate::proxy::{Direction, Fault, Proxy};

/// How long a request waits that is to end within a law.
const TTL: Duration = Duration::from_secs(2);
/// How long a request waits that joins a queue before an outage begins, which a busy machine may delay.
const OUTAGE_WAIT: Duration = Duration::from_secs(6);

/// `store` talks through the proxy, `other` past it. A request joins the queue and its reply is lost; then the server is unreachable for the
/// retry. The caller must not hear that nothing has happened, and the queue entry must not stay: neither if the library sent the request,
/// nor if a caller did that gives up. The process lives on meanwhile, and waits in another queue.
pub async fn an_unknown_request_leaves_nothing(
    proxy: &Proxy,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let elsewhere = take(other, &request("elsewhere")).await;
    let waiting_elsewhere = request("elsewhere");
    let waits = join_queue(store, &waiting_elsewhere, 1).await;
    for library in [false, true] {
        let text = format!("doubt/{library}");
        let held = take(other, &request(&text)).await;
        // With a long ttl: the end of a short one would remove what the store forgets.
        let doubted = request(&text);
        // Everything but the queue entry exists already, and the client knows of the holder.
        refused(store, &request(&text)).await;
        let told = match library {
            true => by_library(proxy, store, other, &doubted).await,
            false => by_hand(proxy, store, other, &doubted).await,
        };
        assert!(matches!(told, Error::Unknown(_)), "the request is in the queue, and the error is: {told}");
        proxy.heal();
        let line = name(&text);
        eventually("the queue entry is removed", || async { waiting(other, &line).await == 0 }).await;
        give_back(other, &held.key).await;
        let next = take(other, &request(&text)).await;
        give_back(other, &next.key).await;
    }
    give_back(other, &elsewhere.key).await;
    end_wait(store, &waiting_elsewhere.key, waits).await;
}

/// A store that is unreachable for a while, for some of its clients.
pub trait Outage {
    /// From now on every call of these clients fails.
    fn begin(&self);
    /// The store is reachable again.
    fn end(&self);
}

impl<O: Outage> Outage for [O] {
    fn begin(&self) {
        self.iter().for_each(O::begin);
    }

    fn end(&self) {
        self.iter().for_each(O::end);
    }
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
/// as soon as the holder releases it. The process waits for another lock meanwhile, where waiters have queue entries.
pub async fn a_release_that_was_given_up_leaves_nothing(
    outage: &(impl Outage + ?Sized),
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let queues = !polls(other);
    let elsewhere = take(other, &request("elsewhere")).await;
    let waiting_elsewhere = request("elsewhere");
    let waits = match queues {
        true => Some(join_queue(store, &waiting_elsewhere, 1).await),
        false => None,
    };
    let (text, queue) = ("given/up", name("given/up"));
    let held = take(other, &request(text)).await;
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    let keeper2 = keeper.clone();
    let requests = tokio::spawn(async move { keeper2.lock(text).ttl(SHORT).acquire().await.map(drop) });
    queue_reaches(other, &queue, 1).await;
    let behind = join_queue(other, &request(text), 2).await;
    outage.begin();
    requests.abort();
    assert!(requests.await.is_err_and(|end| end.is_cancelled()), "it was never granted");
    soon("the release has failed for a ttl", keeper.settle()).await;
    outage.end();
    eventually("the queue entry is removed", || async { !queues || waiting(other, &queue).await == 1 }).await;
    give_back(other, &held.key).await;
    give_back(other, &granted(behind).await.key).await;
    is_free(other, text).await;
    give_back(other, &elsewhere.key).await;
    if let Some(waits) = waits {
        end_wait(store, &waiting_elsewhere.key, waits).await;
    }
}

/// `outage` is that of `store`, not of `other`. A wait ends while the store is unreachable, and the request is queued: its caller does
/// not learn that nothing has happened. Once the store is reachable again the queue entry is removed, though its ttl is long, and the waiter
/// behind it gets the lock. Both for a caller of the library and for one of the store itself.
pub async fn a_wait_that_ends_during_an_outage_leaves_nothing(
    outage: &impl Outage,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let elsewhere = take(other, &request("elsewhere")).await;
    let waiting_elsewhere = request("elsewhere");
    let waits = join_queue(store, &waiting_elsewhere, 1).await;
    for library in [false, true] {
        let text = format!("outage/{library}");
        let queue = name(&text);
        let held = take(other, &request(&text)).await;
        let asked = with(request(&text), |request| request.wait = Wait::For(OUTAGE_WAIT));
        let (store2, text2) = (store.clone(), text.clone());
        let requests = tokio::spawn(async move {
            match library {
                true => {
                    let keeper = Lockkeeper::with_store(store2, Arc::new(SystemClock));
                    let told = keeper.lock(text2).ttl(LONG).wait(OUTAGE_WAIT).acquire().await.map(drop);
                    // The keeper lives on with the process.
                    (told, Some(keeper))
                }
                false => (store2.acquire(&asked).await.map(drop), None),
            }
        });
        queue_reaches(other, &queue, 1).await;
        let behind = join_queue(other, &request(&text), 2).await;
        outage.begin();
        let (told, keeper) = soon("the wait ends", requests).await.expect("the caller ends well");
        assert!(
            matches!(told, Err(Error::Unknown(_))),
            "the request is queued, and its caller is told: {told:?}"
        );
        outage.end();
        eventually("the queue entry is removed", || async { waiting(other, &queue).await == 1 }).await;
        give_back(other, &held.key).await;
        give_back(other, &granted(behind).await.key).await;
        is_free(other, &text).await;
        drop(keeper);
        eventually("the store is reachable", || async { store.inspect(&queue).await.is_ok() }).await;
    }
    give_back(other, &elsewhere.key).await;
    end_wait(store, &waiting_elsewhere.key, waits).await;
}

/// A request is granted and then released before its caller has looked at the reply: the store reports no grant to the caller, because
/// the next client may have the lock by then. `other` is another client.
pub async fn a_grant_that_was_released_meanwhile_is_not_reported(
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) {
    let lock = name("released/meanwhile");
    // Everything that a first request has to prepare is there.
    give_back(store, &take(store, &request(lock.as_str())).await.key).await;
    let mut unseen = 0;
    for _ in 0..20 {
        let asked = request(lock.as_str());
        let mut acquires = std::pin::pin!(store.acquire(&asked));
        // Sends the request. It is not looked at again before the release.
        if futures_util::poll!(&mut acquires).is_ready() {
            give_back(store, &asked.key).await;
            continue;
        }
        let sent = eventually("it is granted", || async { other.inspect(&lock).await.unwrap().is_some() });
        if tokio::time::timeout(TTL, sent).await.is_ok() {
            assert_eq!(store.release(&asked.key).await.unwrap(), ReleaseOutcome::Released);
            unseen += 1;
        }
        let told = soon("an answer", acquires).await;
        if let Ok(AcquireOutcome::Granted(grant)) = told {
            let renewed = store.renew(std::slice::from_ref(&grant)).await;
            let held = matches!(&renewed, Ok(all) if *all == [RenewOutcome::Renewed]);
            assert!(held, "a grant that was released is reported as held: {renewed:?}");
            give_back(store, &grant.key).await;
        }
        is_free(other, lock.as_str()).await;
    }
    assert!(unseen > 0, "no request was granted before its reply was looked at");
}

/// The reply to a renewal is lost, and the locks are held as before. The store reports to their holder neither a loss nor that nothing has
/// happened, and the holder renews them as soon as the store is reachable again.
pub async fn renewals_without_a_reply_are_unknown(proxy: &Proxy, store: &Arc<dyn Store>) {
    let held = [take(store, &request("renewed/1")).await, take(store, &request("renewed/2")).await];
    let lost = proxy.inject(Fault::at_request(1).cut_before_reply());
    let told = soon("an answer", store.renew(&held)).await;
    assert!(lost.fired());
    let fine = match &told {
        // Another request of the client may have been the one without a reply.
        Ok(outcomes) => {
            outcomes.iter().all(|one| matches!(one, RenewOutcome::Unknown | RenewOutcome::Renewed))
        }
        Err(error) => matches!(error, Error::Unknown(_)),
    };
    assert!(fine, "the reply to a renewal was lost, and its caller is told: {told:?}");
    eventually("the locks are renewed", || async {
        store.renew(&held).await.is_ok_and(|all| all.iter().all(|one| *one == RenewOutcome::Renewed))
    })
    .await;
    for grant in &held {
        give_back(store, &grant.key).await;
    }
}

/// The lock of a caller of the store itself is free, and the caller ends. An outage may have ended its wait with an unknown outcome, which
/// the library would have retried: then the caller releases its request.
async fn end_wait(
    store: &Arc<dyn Store>,
    key: &RequestKey,
    wait: tokio::task::JoinHandle<lockkeeper::Result<AcquireOutcome>>,
) {
    match soon("the waiter ends", wait).await.expect("the waiter ends well") {
        Ok(AcquireOutcome::Granted(grant)) => _ = give_back(store, &grant.key).await,
        Err(Error::Unknown(_) | Error::Unavailable(_)) => {
            eventually("its request is released", || async { store.release(key).await.is_ok() }).await;
        }
        other => panic!("a waiter was to be served: {other:?}"),
    }
}

/// Until the request is in the queue; no reply arrives from here on.
async fn arrives(proxy: &Proxy, other: &Arc<dyn Store>, request: &LockRequest) {
    queue_reaches(other, request.key.names.first(), 1).await;
    proxy.cut_all();
}

async fn by_hand(
    proxy: &Proxy,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
    request: &LockRequest,
) -> Error {
    let request = with(request.clone(), |request| request.wait = Wait::Forever);
    proxy.hold(Direction::Replies);
    let (first, ()) = tokio::join!(store.acquire(&request), arrives(proxy, other, &request));
    let again = soon("an answer", store.acquire(&request)).await;
    assert!(
        matches!(again, Err(Error::Unavailable(_) | Error::Unknown(_))),
        "the server is unreachable: {again:?}"
    );
    first.expect_err("there was no reply")
}

async fn by_library(
    proxy: &Proxy,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
    request: &LockRequest,
) -> Error {
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    proxy.hold(Direction::Replies);
    let asked = keeper.lock(request.key.names.first().as_str()).ttl(request.ttl).wait(TTL).acquire();
    let (told, ()) = tokio::join!(asked, arrives(proxy, other, request));
    told.expect_err("there was no reply")
}

async fn waiting(store: &Arc<dyn Store>, name: &LockName) -> usize {
    store.inspect(name).await.expect("inspect works").map_or(0, |view| view.waiting)
}
