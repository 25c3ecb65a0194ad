//! A place that the store has reserved: the caller sleeps until its turn, and gives the place back if it is dropped before.

use lockkeeper_core::Result;
use lockkeeper_host::sleep_until;

use super::TakeOutcome;

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
