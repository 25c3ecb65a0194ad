//! A place that the store has reserved: the caller sleeps until its turn, and gives the place back if it is dropped before.
//!
//! The driver of the keeper sends the take, because a caller that drops its own request would not learn that the store has reserved a place
//! for it, and the callers behind it would wait for that place.

use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{Error, Result};
use lockkeeper_host::sleep_until;
use tokio::sync::oneshot;

use super::TakeOutcome;
use crate::keeper::Lockkeeper;

/// A take whose reply has not come. Dropping it gives the tokens back, now or when the driver has the reply.
struct PendingPlace {
    keeper: Lockkeeper,
    request: LimitRequest,
    key: String,
    reply: oneshot::Receiver<Result<LimitOutcome>>,
}

impl PendingPlace {
    fn take_outcome(&self, outcome: LimitOutcome) -> TakeOutcome {
        let tokens = self.request.buckets[0].tokens;
        TakeOutcome::new(self.keeper.clone(), self.request.clone(), outcome, vec![self.key.clone()], tokens)
    }
}

impl Drop for PendingPlace {
    fn drop(&mut self) {
        self.reply.close();
        if let Ok(Ok(outcome)) = self.reply.try_recv() {
            drop(ReservedPlace(Some(self.take_outcome(outcome))));
        }
    }
}

/// Sends the take of one limit, whose caller may drop the future at any time.
pub(super) async fn reserve(keeper: &Lockkeeper, request: LimitRequest, key: String) -> Result<TakeOutcome> {
    let reply = keeper.0.driver()?.reserve(request.clone());
    let mut pending = PendingPlace { keeper: keeper.clone(), request, key, reply };
    let outcome = (&mut pending.reply).await.map_err(|_| {
        Error::Unknown("the thread of the keeper has ended, and the tokens may have been taken".into())
    })??;
    Ok(pending.take_outcome(outcome))
}

/// Tokens that may not be used yet. Dropping it gives them back in the background.
struct ReservedPlace(Option<TakeOutcome>);

impl Drop for ReservedPlace {
    fn drop(&mut self) {
        let Some(mut outcome) = self.0.take() else { return };
        let tokens = outcome.left();
        if let (Ok(request), Ok(driver)) = (outcome.refund_request(tokens), outcome.keeper().0.driver()) {
            driver.refund_later(request);
        }
    }
}

/// Waits for the turn of a take that was allowed.
pub(super) async fn sleep_until_usable(outcome: TakeOutcome) -> Result<TakeOutcome> {
    if !outcome.allowed() || outcome.wait().is_zero() {
        return Ok(outcome);
    }
    let (clock, wait) = (outcome.keeper().0.clock.clone(), outcome.wait());
    let mut place = ReservedPlace(Some(outcome));
    // The reply came after the decision, so the turn has come when this time has passed.
    sleep_until(&*clock, clock.now() + wait).await;
    Ok(place.0.take().expect("the place was kept until its turn"))
}
