//! A grant whose caller has not looked at it yet.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Dir, open, request, take};
use lockkeeper_core::{AcquireOutcome, Error, LockRequest, Locks, ReleaseOutcome, Store};
use lockkeeper_sqlite::SqliteStore;
use lockkeeper_testkit::laws::unknown;

/// Another task that uses the store all the time: the requests of several callers are run by the worker's thread.
struct Beside(tokio::task::JoinHandle<()>);

impl Beside {
    fn start(store: SqliteStore) -> Self {
        Beside(tokio::spawn(async move {
            loop {
                let grant = take(&store, &request("beside")).await;
                store.release(&grant.key).await.unwrap();
            }
        }))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The reply waited for its caller, and was reported as a grant although the caller had released the request meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_was_released_meanwhile() {
    let dir = Dir::new();
    let (sqlite, other) = (open(&dir.db()), open(&dir.db()));
    let beside = Beside::start(sqlite.clone());
    let (store, other): (Arc<dyn Store>, Arc<dyn Store>) = (Arc::new(sqlite), Arc::new(other));
    unknown::a_grant_that_was_released_meanwhile_is_not_reported(&store, &other).await;
    drop(beside);
}

/// The same for a request that has waited in the queue: it is granted its lock by the worker, whatever its caller does.
#[tokio::test]
async fn a_grant_after_a_wait_that_was_released_meanwhile() {
    let dir = Dir::new();
    let (store, other) = (open(&dir.db()), open(&dir.db()));
    let held = take(&other, &request("a")).await;
    let asked = LockRequest { wait: lockkeeper_core::Wait::For(Duration::from_secs(600)), ..request("a") };
    let mut acquires = std::pin::pin!(store.acquire(&asked));
    let first = std::future::poll_fn(|cx| std::task::Poll::Ready(acquires.as_mut().poll(cx))).await;
    assert!(first.is_pending());
    common::wait_for_waiters(&other, "a", 1).await;
    other.release(&held.key).await.unwrap();
    // Granted, and its caller has not looked.
    let is_granted = || async { other.inspect(&common::name("a")).await.unwrap().unwrap().waiting == 0 };
    let end = std::time::Instant::now() + common::PATIENCE;
    while !is_granted().await {
        assert!(std::time::Instant::now() < end, "it is not granted");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(store.release(&asked.key).await.unwrap(), ReleaseOutcome::Released);
    let told = acquires.await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    assert!(matches!(other.acquire(&request("a")).await, Ok(AcquireOutcome::Granted(_))));
}
