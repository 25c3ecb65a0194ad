//! Waiters of clients with different claims.

use lockkeeper_core::{AcquireOutcome, Wait};

use super::*;
use crate::proxy::{Direction, Proxy};

/// Clients with different claims wait for one lock. `patient` has a long one and talks through the proxy, `hasty` has a short one, which
/// `silence` outlasts. The patient one's position is kept for its own claim, and so is a lock that was handed off to it: a
/// request or a release by the hasty client shortens neither.
pub async fn a_short_claim_does_not_shorten_that_of_another_client(
    proxy: &Proxy,
    (patient, hasty): (&Arc<dyn Store>, &Arc<dyn Store>),
    silence: Duration,
) {
    let held = take(hasty, &request("claims")).await;
    let first = join_queue(patient, &request("claims"), 1).await;
    proxy.hold(Direction::Requests);
    proxy.hold(Direction::Replies);
    let brief = with(request("claims"), |request| request.wait = Wait::For(silence));
    let answer = soon("a wait ends", hasty.acquire(&brief)).await;
    assert!(matches!(answer, Ok(AcquireOutcome::Busy(_))), "{answer:?}");
    tokio::time::sleep(silence).await;
    let view = hasty.inspect(&name("claims")).await.expect("inspect works").expect("it is held");
    assert_eq!(view.waiting, 1, "the first waiter lost its queue entry to the claim of another client");
    let second = join_queue(hasty, &request("claims"), 2).await;
    give_back(hasty, &held.key).await;
    tokio::time::sleep(silence).await;
    assert!(!second.is_finished(), "the hand-off to the first waiter ended with the claim of another client");
    proxy.heal();
    let next = granted(first).await;
    give_back(patient, &next.key).await;
    give_back(hasty, &granted(second).await.key).await;
    is_free(hasty, "claims").await;
}
