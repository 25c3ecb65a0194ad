use std::time::Duration;

use futures_util::stream::{self, Stream};
use lockkeeper_host::{Clock, random_128, sleep_until};

/// Pauses that grow, each of a random length up to its ceiling ("full jitter"): those who met once do not meet again.
pub(crate) struct Backoff<'a> {
    clock: &'a dyn Clock,
    ceiling: Duration,
    most: Duration,
}

impl<'a> Backoff<'a> {
    pub fn new(clock: &'a dyn Clock) -> Self {
        Backoff { clock, ceiling: Duration::from_millis(4), most: Duration::from_millis(500) }
    }

    pub async fn wait(&mut self) {
        sleep_until(self.clock, self.clock.now() + part_of(self.ceiling)).await;
        self.ceiling = (self.ceiling * 2).min(self.most);
    }
}

/// A random part of `span`, all of it included.
pub(crate) fn part_of(span: Duration) -> Duration {
    let [a, b, c, d, ..] = random_128();
    span.mul_f64(f64::from(u32::from_ne_bytes([a, b, c, d])) / f64::from(u32::MAX))
}

/// Waits for about `every`: three quarters of it to five quarters, so that those who look do not look together.
pub(crate) async fn look_again(clock: &dyn Clock, every: Duration) {
    sleep_until(clock, clock.now() + every * 3 / 4 + part_of(every / 2)).await;
}

/// A stream that asks `state` for its next item, for ever.
pub(crate) fn endless<S, T, F>(state: S, next: impl FnMut(S) -> F) -> impl Stream<Item = T>
where
    F: Future<Output = Option<(T, S)>>,
{
    stream::unfold(state, next)
}
