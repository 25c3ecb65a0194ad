//! What time it is at DynamoDB. Every answer says so in its `Date`, to the second.
//!
//! Nothing that keeps two holders apart depends on it. It is the floor of fences and versions, the end
//! of records, and what people are shown: the clocks of a fleet differ, and one that is years off should do no harm to others.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use aws_sdk_dynamodb::config::interceptors::BeforeDeserializationInterceptorContextRef;
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};
use lockkeeper_core::Wall;
use lockkeeper_host::Clock;

/// `Date` has whole seconds: our own clock is believed if it is that close.
const CLOSE: i64 = 1_500_000;
/// The year 2100. A clock beyond it is broken, and would use up the fences of a lock for ever.
const LATEST: u64 = 4_102_444_800_000_000;

/// Our clock, set right by what DynamoDB says.
#[derive(Clone, Debug)]
pub struct WallClock {
    clock: Arc<dyn Clock>,
    /// What is added to our clock, in µs.
    off: Arc<AtomicI64>,
}

impl WallClock {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        WallClock { clock, off: Arc::default() }
    }

    pub fn now(&self) -> Wall {
        let now = self.clock.wall().as_micros().saturating_add_signed(self.off.load(Ordering::Relaxed));
        Wall::from_micros(if now < LATEST { now } else { 0 })
    }

    /// DynamoDB has just said that it is this time.
    fn told(&self, seconds: i64) {
        let ours = i64::try_from(self.clock.wall().as_micros()).unwrap_or(i64::MAX);
        let off = seconds.saturating_mul(1_000_000).saturating_add(500_000).saturating_sub(ours);
        self.off.store(if off.abs() <= CLOSE { 0 } else { off }, Ordering::Relaxed);
    }
}

impl Intercept for WallClock {
    fn name(&self) -> &'static str {
        "WallClock"
    }

    fn read_after_transmit(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context.response().headers().get("date");
        if let Some(date) = date.and_then(|date| DateTime::from_str(date, DateTimeFormat::HttpDate).ok()) {
            self.told(date.secs());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper_host::VirtualClock;

    #[test]
    fn a_clock_that_is_off_is_set_right_and_a_good_one_is_left_alone() {
        let clock = Arc::new(VirtualClock::default());
        let wall = WallClock::new(clock.clone());
        clock.set_wall(Wall::from_micros(1_000_400_000));
        wall.told(1_000);
        assert_eq!(wall.now().as_micros(), 1_000_400_000);
        wall.told(5_000);
        assert_eq!(wall.now().as_micros(), 5_000_500_000);
        clock.set_wall(Wall::from_micros(LATEST + 7));
        assert_eq!(wall.now().as_micros(), 0, "the year 2100 is believed");
        wall.told(6_000);
        assert_eq!(wall.now().as_micros(), 6_000_500_000);
    }
}
