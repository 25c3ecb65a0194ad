//! DynamoDB's wall clock, from the header `Date` of its replies, which has whole seconds.
//!
//! Mutual exclusion does not depend on it. It is the lower bound of fences and versions, it ends records, and it is shown in views:
//! the clocks of clients differ, and a client whose clock is years off must do no harm to others.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use aws_sdk_dynamodb::config::interceptors::BeforeDeserializationInterceptorContextRef;
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};
use lockkeeper_core::WallTime;
use lockkeeper_host::Clock;

/// The client's own clock is used if it differs by less than this from `Date`, which has whole seconds. In µs.
const TOLERANCE: i64 = 1_500_000;
/// The year 2100. A clock beyond it is wrong, and would use up the fences of a lock for ever.
const LATEST: u64 = 4_102_444_800_000_000;

/// The client's clock, corrected by the replies of DynamoDB.
#[derive(Clone, Debug)]
pub struct DynamoClock {
    clock: Arc<dyn Clock>,
    /// The correction in µs.
    offset: Arc<AtomicI64>,
}

impl DynamoClock {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        DynamoClock { clock, offset: Arc::default() }
    }

    pub fn now(&self) -> WallTime {
        let now = self.clock.wall().as_micros().saturating_add_signed(self.offset.load(Ordering::Relaxed));
        WallTime::from_micros(if now < LATEST { now } else { 0 })
    }

    /// Records the time of a reply that has just arrived.
    fn record_date(&self, seconds: i64) {
        let ours = i64::try_from(self.clock.wall().as_micros()).unwrap_or(i64::MAX);
        let offset = seconds.saturating_mul(1_000_000).saturating_add(500_000).saturating_sub(ours);
        self.offset.store(if offset.abs() <= TOLERANCE { 0 } else { offset }, Ordering::Relaxed);
    }
}

impl Intercept for DynamoClock {
    fn name(&self) -> &'static str {
        "DynamoClock"
    }

    fn read_after_transmit(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context.response().headers().get("date");
        if let Some(date) = date.and_then(|date| DateTime::from_str(date, DateTimeFormat::HttpDate).ok()) {
            self.record_date(date.secs());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper_host::VirtualClock;

    #[test]
    fn a_wrong_clock_is_corrected_and_a_close_one_is_used() {
        let clock = Arc::new(VirtualClock::default());
        let wall = DynamoClock::new(clock.clone());
        clock.set_wall(WallTime::from_micros(1_000_400_000));
        wall.record_date(1_000);
        assert_eq!(wall.now().as_micros(), 1_000_400_000);
        wall.record_date(5_000);
        assert_eq!(wall.now().as_micros(), 5_000_500_000);
        clock.set_wall(WallTime::from_micros(LATEST + 7));
        assert_eq!(wall.now().as_micros(), 0, "a time after the year 2100 was used");
        wall.record_date(6_000);
        assert_eq!(wall.now().as_micros(), 6_000_500_000);
    }
}
