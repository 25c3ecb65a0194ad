//! Pauses with jitter: the back-off of retries, and the interval of polls.

use std::time::Duration;

use futures_util::stream::{self, Stream};
use lockkeeper_host::{Clock, random_128, sleep_until};

/// A back-off with full jitter: each pause is random, up to a ceiling that doubles. Clients that collided
/// once are unlikely to collide again.
pub(crate) struct JitteredBackoff<'a> {
    clock: &'a dyn Clock,
    ceiling: Duration,
    most: Duration,
}

impl<'a> JitteredBackoff<'a> {
    pub fn new(clock: &'a dyn Clock) -> Self {
        JitteredBackoff { clock, ceiling: Duration::from_millis(4), most: Duration::from_millis(500) }
    }

    pub async fn wait(&mut self) {
        sleep_until(self.clock, self.clock.now() + random_part(self.ceiling)).await;
        self.ceiling = (self.ceiling * 2).min(self.most);
    }
}

/// A random part of `duration`, up to all of it.
pub(crate) fn random_part(duration: Duration) -> Duration {
    let [a, b, c, d, ..] = random_128();
    duration.mul_f64(f64::from(u32::from_ne_bytes([a, b, c, d])) / f64::from(u32::MAX))
}

/// The pause after so many failed attempts, at least one: doubled each time from the first to the most, and up to a half of
/// it random, so that what failed together is not tried together.
pub(crate) fn growing_pause((first, most): (Duration, Duration), attempts: u32) -> Duration {
    let full = first.saturating_mul(1 << attempts.saturating_sub(1).min(30)).min(most);
    full / 2 + random_part(full / 2)
}

/// Waits for three to five quarters of `every`, so that clients do not poll at the same moment.
pub(crate) async fn pause_between_polls(clock: &dyn Clock, every: Duration) {
    sleep_until(clock, clock.now() + every * 3 / 4 + random_part(every / 2)).await;
}

/// A stream that calls `next` for each item and never ends.
pub(crate) fn unfold_forever<S, T, F>(state: S, next: impl FnMut(S) -> F) -> impl Stream<Item = T>
where
    F: Future<Output = Option<(T, S)>>,
{
    stream::unfold(state, next)
}
