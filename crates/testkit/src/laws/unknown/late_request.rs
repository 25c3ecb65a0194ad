//! Requests that the network delays until their caller expects nothing of them any more.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper::Error;
use lockkeeper_core::{AcquireOutcome, LockRequest, Store, Wait};

use super::super::{eventually, give_back, is_free, name, request, soon, take, with};
use super::waiting;
use crate::proxy::{Fault, Proxy};

/// How long a server may take to answer a late request, before it counts as one that does not.
const ARRIVES: Duration = Duration::from_secs(2);

/// `store` talks through the proxy, `other` past it. The network delays a request until after its caller has released it, or until after
/// the caller has sent it again and got the answer that the lock is busy. It is delivered then, and no holder has the lock: neither
/// granted for a long ttl nor queued. Returns whether the server answered the late requests: a server may also notice that its
/// client has gone.
pub async fn a_request_that_arrives_after_its_release_takes_nothing(
    proxy: &Proxy,
    store: &Arc<dyn Store>,
    other: &Arc<dyn Store>,
) -> bool {
    let mut arrived = true;
    for queued in [false, true] {
        let proxies = std::slice::from_ref(proxy);
        let late = Fault::at_request(1).hold();
        arrived &= late_request_takes_nothing(proxies, (store, other), late, queued).await;
    }
    arrived
}

/// The same for one kind of request, queued or for a free lock, which this `fault` delays on its way to every server. A store that reads
/// before it writes names its write.
pub async fn late_request_takes_nothing(
    proxies: &[Proxy],
    stores: (&Arc<dyn Store>, &Arc<dyn Store>),
    fault: Fault,
    queued: bool,
) -> bool {
    let mut arrived = true;
    for meanwhile in [Meanwhile::Release, Meanwhile::BusyRetry] {
        arrived &= arrives_late(proxies, stores, fault.clone(), queued, meanwhile).await;
    }
    arrived
}

/// The steps of the caller while its request is on its way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Meanwhile {
    /// It releases the attempt.
    Release,
    /// It sends the request again without a wait, and the lock is busy: such a caller has nothing to release.
    BusyRetry,
}

async fn arrives_late(
    proxies: &[Proxy],
    (store, other): (&Arc<dyn Store>, &Arc<dyn Store>),
    fault: Fault,
    queued: bool,
    meanwhile: Meanwhile,
) -> bool {
    let text = format!("late/{queued}/{meanwhile:?}");
    let held = if queued { Some(take(other, &request(&text)).await) } else { None };
    let asked = with(request(&text), |request| request.wait = if queued { Wait::Forever } else { Wait::No });
    let late: Vec<_> = proxies.iter().map(|proxy| proxy.inject(fault.clone())).collect();
    let answer = soon("an answer", store.acquire(&asked)).await;
    assert!(
        matches!(answer, Err(Error::Unknown(_))) && late.iter().all(|late| late.fired()),
        "{text}: {answer:?}"
    );
    match meanwhile {
        Meanwhile::Release => {
            soon("the request is released", async {
                while let Err(error) = store.release(&asked.key).await {
                    assert!(matches!(error, Error::Unknown(_) | Error::Unavailable(_)), "{error}");
                }
            })
            .await;
        }
        Meanwhile::BusyRetry if queued => is_busy(store, &asked).await,
        Meanwhile::BusyRetry => {
            let held = take(other, &request(&text)).await;
            is_busy(store, &asked).await;
            give_back(other, &held.key).await;
        }
    }
    let replies = || proxies.iter().map(|proxy| proxy.count().replies).collect::<Vec<_>>();
    let before = replies();
    late.iter().for_each(|late| late.release());
    let answered = eventually("each server has answered it", || async {
        replies().iter().zip(&before).all(|(now, before)| now > before)
    });
    let arrived = tokio::time::timeout(ARRIVES, answered).await.is_ok();
    if let Some(held) = held {
        eventually("no queue entry stays", || async { waiting(other, &name(&text)).await == 0 }).await;
        give_back(other, &held.key).await;
    }
    is_free(other, &text).await;
    arrived
}

/// Sends a request again without a wait until the store has an answer, which is that the lock is busy.
async fn is_busy(store: &Arc<dyn Store>, request: &LockRequest) {
    let request = with(request.clone(), |request| request.wait = Wait::No);
    soon("a retry is answered", async {
        loop {
            match store.acquire(&request).await {
                Ok(AcquireOutcome::Busy(_)) => break,
                Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
                other => panic!("the lock was to be busy: {other:?}"),
            }
        }
    })
    .await;
}
