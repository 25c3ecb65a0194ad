//! The laws on a small store that keeps locks as files in a directory: a store of an outside author needs no more than this.

mod acquire;
mod codec;
mod error;
mod keys;
mod profile;
mod statements;
mod store;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Attempt, Store};
use lockkeeper_host::{Clock, SystemClock, VirtualClock, random_128};
use lockkeeper_testkit::laws::{Harness, wake};
use store::DirectoryStore;

/// One directory; each client opens it anew, as another process would. Without a virtual clock the machine's own applies.
struct Directory {
    virtual_clock: Option<VirtualClock>,
    path: PathBuf,
}

impl Directory {
    fn create(virtual_clock: Option<VirtualClock>) -> Self {
        let unique = Attempt::from_bytes(random_128()).to_hex();
        let path = std::env::temp_dir().join(format!("lockkeeper-directory-{unique}"));
        std::fs::create_dir(&path).expect("a new directory");
        Directory { virtual_clock, path }
    }
}

#[async_trait]
impl Harness for Directory {
    async fn start() -> Option<Self> {
        Some(Directory::create(Some(VirtualClock::default())))
    }

    async fn client(&self) -> Arc<dyn Store> {
        Arc::new(DirectoryStore::open(&self.path, self.clock()).expect("the directory is there"))
    }

    fn clock(&self) -> Arc<dyn Clock> {
        match &self.virtual_clock {
            Some(clock) => Arc::new(clock.clone()),
            None => Arc::new(SystemClock),
        }
    }

    fn for_correctness() -> bool {
        false
    }

    async fn pass(&self, time: Duration) {
        match &self.virtual_clock {
            Some(clock) => clock.advance(time),
            None => tokio::time::sleep(time).await,
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

// Every recipe is built on records, which this store does not have: `recipes!` would only repeat that it refuses them.
lockkeeper_testkit::conformance!(Directory);

/// A virtual clock stands still while a law waits for a grant, so only the machine's clock measures how long the waiter waited.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_declared_wake_holds_on_the_clock_of_the_machine() {
    wake::the_next_waiter_is_let_in_within_the_declared_time(Directory::create(None)).await;
}
