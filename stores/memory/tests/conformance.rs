//! The laws on the reference store, with a virtual clock.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
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
}

lockkeeper_testkit::conformance!(Memory);
mod recipes {
    use super::*;
    lockkeeper_testkit::recipes!(Memory);
}
