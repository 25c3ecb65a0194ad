//! The pauses of a client that DynamoDB throttles, and random durations.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Result};
use lockkeeper_host::{Clock, random_128, sleep_until};

use crate::config::Options;
use crate::error::Failure;

/// The pauses of one operation while DynamoDB throttles it: from 25 ms to 1 s, for `timeout` altogether.
pub struct ThrottleBackoff {
    clock: Arc<dyn Clock>,
    until: BootInstant,
    next: Duration,
}

impl ThrottleBackoff {
    pub fn new(options: &Options) -> Self {
        let clock = options.clock.clone();
        let until = clock.now() + options.timeout;
        ThrottleBackoff { clock, until, next: Duration::from_millis(25) }
    }

    /// Waits after a throttled call, which DynamoDB has not executed. Returns every other failure as an error at once.
    pub async fn pause(&mut self, failure: Failure) -> Result<()> {
        let clock = &*self.clock;
        if !matches!(failure, Failure::Throttled(_)) || clock.now() >= self.until {
            return Err(Error::from(failure));
        }
        tracing::debug!(?failure, "DynamoDB throttles; retrying in at most {:?}", self.next);
        sleep_until(clock, clock.now() + self.next / 2 + jitter(self.next / 2)).await;
        self.next = (self.next * 2).min(Duration::from_secs(1));
        Ok(())
    }
}

/// Repeats a call for as long as DynamoDB throttles it, within `timeout`.
pub async fn retry_throttled<T, F>(options: &Options, mut call: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T, Failure>>,
{
    let mut backoff = ThrottleBackoff::new(options);
    loop {
        match call().await {
            Ok(value) => return Ok(value),
            Err(failure) => backoff.pause(failure).await?,
        }
    }
}

/// A random duration up to `most`.
pub fn jitter(most: Duration) -> Duration {
    let [a, b, c, d, ..] = random_128();
    most.mul_f64(f64::from(u32::from_be_bytes([a, b, c, d])) / f64::from(u32::MAX))
}
