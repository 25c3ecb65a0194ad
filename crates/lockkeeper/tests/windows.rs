//! What `windows` and `once` do with a store that refuses their writes.
#![cfg(feature = "memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use lockkeeper::{Clock, Lockkeeper, Result, Store};
use lockkeeper_core::{
    AcquireOutcome, Expect, Grant, LockName, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey,
    WriteOutcome,
};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;

/// A store that answers every write with a conflict, as one whose records another client changes all the time.
struct ConflictingStore {
    store: Arc<dyn Store>,
    writes: AtomicUsize,
}

lockkeeper_testkit::forward_locks!(ConflictingStore, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
});

lockkeeper_testkit::forward_records!(ConflictingStore, {
    async fn write(&self, _: &LockName, _: &[u8], _: Expect, _: Option<Duration>) -> Result<WriteOutcome> {
        self.writes.fetch_add(1, SeqCst);
        // A reply takes its time.
        tokio::task::yield_now().await;
        Ok(WriteOutcome::Conflict(None))
    }
});

/// Polls a future so often, or until it ends.
async fn poll_often(mut work: std::pin::Pin<&mut impl Future>) {
    for _ in 0..1000 {
        if tokio::time::timeout(Duration::ZERO, work.as_mut()).await.is_ok() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// A keeper of such a store, and its clock.
fn conflicting() -> (VirtualClock, Arc<ConflictingStore>, Lockkeeper) {
    let clock = VirtualClock::default();
    let store = Arc::new(MemoryStore::new(Arc::new(clock.clone())));
    let store = Arc::new(ConflictingStore { store, writes: AtomicUsize::new(0) });
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(clock.clone()));
    (clock, store, keeper)
}

/// Fails if `begin` writes more than a few times while no time passes, or never again.
async fn pauses(clock: &VirtualClock, store: &ConflictingStore, begin: impl Future) {
    let mut begin = std::pin::pin!(begin);
    poll_often(begin.as_mut()).await;
    let at_once = store.writes.load(SeqCst);
    assert!((1..=3).contains(&at_once), "{at_once} writes while no time passed");
    // It goes on when time passes.
    clock.advance(Duration::from_secs(1));
    poll_often(begin.as_mut()).await;
    let later = store.writes.load(SeqCst);
    assert!(later > at_once && later <= at_once + 3, "{later} writes after a pause, and {at_once} before");
}

/// Each refusal was followed by the next write at once: one host with a clock or a record that is odd kept the store busy alone.
#[tokio::test]
async fn a_store_that_refuses_every_write_is_not_called_in_a_loop() {
    let (clock, store, keeper) = conflicting();
    let guard = keeper.lock("nightly").ttl(Duration::from_secs(600)).acquire().await.unwrap();
    let windows = keeper.windows("nightly");
    pauses(&clock, &store, windows.begin(&guard, clock.wall().as_micros() / 1000)).await;
    let (clock, store, keeper) = conflicting();
    pauses(&clock, &store, keeper.once("k").ttl(Duration::from_secs(600)).claim()).await;
}
