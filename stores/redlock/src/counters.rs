//! The highest fence that this process has seen, and the numbers of its rounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lockkeeper_core::Fence;
use lockkeeper_host::Clock;

/// Two numbers that only grow.
pub struct Counters {
    clock: Arc<dyn Clock>,
    highest_fence_seen: AtomicU64,
    last_round: AtomicU64,
}

impl Counters {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Counters { clock, highest_fence_seen: AtomicU64::new(0), last_round: AtomicU64::new(0) }
    }

    /// The number of the next round. It is higher than all before, also than those of an earlier process.
    pub fn next_round(&self) -> u64 {
        let wall = self.clock.wall().as_micros();
        let next = |last: u64| (last + 1).max(wall);
        let last =
            self.last_round.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(next(last)));
        next(last.unwrap_or_else(|last| last))
    }

    /// The highest fence that this process has seen, if any.
    pub fn highest_fence_seen(&self) -> Option<Fence> {
        Fence::new(self.highest_fence_seen.load(Ordering::Relaxed)).ok()
    }

    /// Notes a fence: whatever happens to the nodes, the next one that this process gets is higher.
    pub fn record_fence(&self, fence: Fence) {
        self.highest_fence_seen.fetch_max(fence.get(), Ordering::Relaxed);
    }
}
