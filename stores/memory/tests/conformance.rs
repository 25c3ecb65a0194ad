//! The laws on the reference store, with a virtual clock.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Store, WallTime};
use lockkeeper_host::{Clock, VirtualClock};
use lockkeeper_memory::MemoryStore;
use lockkeeper_testkit::laws::Harness;

struct Memory {
    clock: VirtualClock,
    store: MemoryStore,
}

#[async_trait]
impl Harness for Memory {
    async fn start() -> Option<Self> {
        let clock = VirtualClock::default();
        Some(Memory { store: MemoryStore::new(Arc::new(clock.clone())), clock })
    }

    async fn client(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(self.clock.clone())
    }

    fn for_correctness() -> bool {
        false
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }

    async fn set_wall_clock_back(&self, by: Duration) {
        let wall = self.clock.wall().as_micros() - by.as_micros() as u64;
        self.clock.set_wall(WallTime::from_micros(wall));
    }

    async fn stored_buckets(&self) -> usize {
        self.store.buckets()
    }
}

lockkeeper_testkit::conformance!(Memory);
mod recipes {
    use super::*;
    lockkeeper_testkit::recipes!(Memory);
}
