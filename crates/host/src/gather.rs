use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;

/// The most that is waited for those who were answered together to ask again, since the last of them did.
const LULL: Duration = Duration::from_micros(500);

/// A moment's patience, for what travels together. Most of those who are answered together ask again within a moment: a release
/// follows, or the next lock. What leaves with the first of them costs a server as much as what would leave with all of them. Whoever is
/// alone waits for nobody.
#[derive(Debug, Default)]
pub struct Gather {
    expected: usize,
    until: Option<Instant>,
    lull: Duration,
}

impl Gather {
    /// After an answer to some, for which it `took` so long: so many are `expected` to leave next.
    pub fn after(expected: usize, took: Duration) -> Self {
        Gather { expected, until: Some(Instant::now() + took / 2), lull: (took / 6).min(LULL) }
    }

    /// Adds those who come to those who are `waiting`, until all are there who are expected, or nobody comes any more.
    pub async fn wait<T>(&mut self, orders: &mut UnboundedReceiver<T>, waiting: &mut VecDeque<T>) {
        let Some(until) = self.until.take() else { return };
        let mut last = Instant::now();
        while waiting.len() < self.expected && last.elapsed() < self.lull && Instant::now() < until {
            // A timer would be too coarse. Whoever is to come may want this core.
            std::thread::yield_now();
            tokio::task::yield_now().await;
            while let Ok(order) = orders.try_recv() {
                waiting.push_back(order);
                last = Instant::now();
            }
        }
    }
}
