//! How long a sender of batches waits for more requests before it sends a batch.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;

/// The longest time to wait for the next request since the last one came.
const LULL: Duration = Duration::from_micros(500);

/// Adaptive batching delay: waits up to 500 µs for the callers that the last batch has just answered.
///
/// Most of these callers send their next request at once, a release or the next acquire. A batch that leaves with the first of them
/// costs the server as much as a batch with all of them. A caller that is alone does not wait.
#[derive(Debug, Default)]
pub struct BatchDelay {
    expected: usize,
    until: Option<Instant>,
    lull: Duration,
}

impl BatchDelay {
    /// The delay after a batch whose round trip `took` this long: this many callers are `expected` to send again.
    pub fn after(expected: usize, took: Duration) -> Self {
        BatchDelay { expected, until: Some(Instant::now() + took / 2), lull: (took / 6).min(LULL) }
    }

    /// Moves new requests from the channel to `waiting`, until the expected number is there or no more come.
    pub async fn wait<T>(&mut self, requests: &mut UnboundedReceiver<T>, waiting: &mut VecDeque<T>) {
        let Some(until) = self.until.take() else { return };
        let mut last = Instant::now();
        while waiting.len() < self.expected && last.elapsed() < self.lull && Instant::now() < until {
            // A timer would be too coarse. The callers may need this core.
            std::thread::yield_now();
            tokio::task::yield_now().await;
            while let Ok(request) = requests.try_recv() {
                waiting.push_back(request);
                last = Instant::now();
            }
        }
    }
}
