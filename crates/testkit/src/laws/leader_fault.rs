//! The laws that contend, with a fault in the middle: a leader that dies, hangs or is cut off.
//!
//! A law knows nothing of faults: its clients are [`RetryingStore`], as the driver of a guard is. They ask again with the same
//! attempt when an answer is lost; what they must never get is a wrong one.

use std::collections::HashSet;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{
    AcquireOutcome, Attempt, DeleteOutcome, Error, EventStream, Expect, Fence, Grant, IgnorePoison, Limits,
    LockName, LockPage, LockRequest, LockView, Locks, Page, Profile, Record, RecordPage, Records,
    ReleaseOutcome, RenewOutcome, RequestKey, Result, Store, WriteOutcome,
};

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(50);

/// Strikes once, when the clients of a law have begun so many calls together.
pub struct Storm {
    calls: AtomicUsize,
    at: usize,
    strike: Box<dyn Fn() + Send + Sync>,
    struck: AtomicUsize,
}

impl Storm {
    /// `strike` is called on a thread of its own, and must not wait for the law.
    pub fn new(at: usize, strike: impl Fn() + Send + Sync + 'static) -> Arc<Storm> {
        let (calls, struck) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(Storm { calls, at, strike: Box::new(strike), struck })
    }

    /// Whether it has struck: a law that ended before proves nothing.
    pub fn has_struck(&self) -> bool {
        self.struck.load(Ordering::SeqCst) > 0
    }

    async fn call(self: &Arc<Self>) {
        if self.calls.fetch_add(1, Ordering::SeqCst) + 1 == self.at {
            let storm = self.clone();
            tokio::task::spawn_blocking(move || (storm.strike)()).await.expect("the fault is made");
            self.struck.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// A store that retries a request without a reply, for as long as the caller's wait lasts.
pub struct RetryingStore {
    store: Arc<dyn Store>,
    storm: Arc<Storm>,
    /// The attempts that were released while they were requested: they are not requested again.
    left: Mutex<HashSet<Attempt>>,
}

impl RetryingStore {
    /// One more client in the storm.
    pub fn new(store: Arc<dyn Store>, storm: Arc<Storm>) -> Arc<RetryingStore> {
        Arc::new(RetryingStore { store, storm, left: Mutex::default() })
    }

    fn has_left(&self, attempt: Attempt) -> bool {
        self.left.lock().ignore_poison().contains(&attempt)
    }

    async fn again<T, F: Future<Output = Result<T>>>(&self, mut call: impl FnMut() -> F) -> Result<T> {
        self.storm.call().await;
        loop {
            match call().await {
                Err(Error::Unknown(_) | Error::Unavailable(_)) => tokio::time::sleep(PAUSE).await,
                answer => return answer,
            }
        }
    }
}

#[async_trait]
impl Locks for RetryingStore {
    fn profile(&self) -> Profile {
        self.store.profile()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.storm.call().await;
        loop {
            match self.store.acquire(request).await {
                Err(error @ (Error::Unknown(_) | Error::Unavailable(_))) => {
                    tokio::time::sleep(PAUSE).await;
                    if self.has_left(request.key.attempt) {
                        return Err(error);
                    }
                }
                answer => return answer,
            }
        }
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.again(|| self.store.renew(grants)).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.left.lock().ignore_poison().insert(key.attempt);
        let mut tries = 0;
        let answer = self.again(|| {
            tries += 1;
            self.store.release(key)
        });
        match answer.await {
            // The try whose answer was lost has done it.
            Ok(ReleaseOutcome::AlreadyGone) if tries > 1 => Ok(ReleaseOutcome::Released),
            answer => answer,
        }
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.again(|| self.store.inspect(name)).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.again(|| self.store.list(prefix, page)).await
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.again(|| self.store.watch(prefix)).await
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.again(|| self.store.revoke(name, reason)).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.again(|| self.store.break_lock(name, reason)).await
    }
}

/// Not retried: a writer of a record has to read its outcome itself.
#[async_trait]
impl Records for RetryingStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.again(|| self.store.read(key)).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        self.store.write(key, value, expect, ttl).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.store.delete(key, expect).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.again(|| self.store.scan(prefix, page)).await
    }
}

/// Not retried: a take that may have happened would take twice.
#[async_trait]
impl Limits for RetryingStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        self.store.limit(request).await
    }
}

crate::forward_examine!(RetryingStore);

/// Calls a macro with every law in which several clients contend, all of them with leases that outlast a fault. Laws marked
/// `(long)` are much like others, and run in the long suites only.
#[macro_export]
macro_rules! every_contending_law {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            exclusion::one_name_has_one_holder (long),
            exclusion::racing_clients_never_hold_together,
            fence::fences_grow_across_names_and_clients,
            queue::waiters_are_served_in_order,
            queue::one_release_serves_one_waiter,
            queue::a_waiter_that_left_is_never_served,
            queue::a_queued_request_is_not_doubled (long),
            queue::no_request_overtakes_the_queue (long),
            modes::shared_holders_share_and_keep_writers_out (long),
            modes::a_waiting_writer_is_not_starved (long),
            modes::permits_are_counted,
            modes::several_names_are_all_or_nothing,
            modes::several_names_hold_nothing_while_they_wait (long),
        }
    };
}
