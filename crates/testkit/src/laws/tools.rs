//! The tools that the laws are written with.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::{
    AcquireOutcome, Attempt, Busy, Grant, Holder, LockName, LockRequest, Names, Owner, RequestKey, Result,
    Store, Wait, WaitOrder,
};
use lockkeeper_host::{host_name, random_128};
use tokio::task::JoinHandle;

/// A ttl that ends within a law.
pub const SHORT: Duration = Duration::from_secs(1);
/// A ttl that does not end within a law, however slow the machine is.
pub const LONG: Duration = Duration::from_secs(600);

/// How long something that must happen may take before a law says that it did not: generous, because a busy machine is
/// not a broken law; shorter where a planted bug is expected to make it not happen.
static PATIENCE_MS: AtomicU64 = AtomicU64::new(30_000);

/// Sets how long laws wait for something that must happen.
pub fn set_patience(patience: Duration) {
    PATIENCE_MS.store(patience.as_millis() as u64, Ordering::Relaxed);
}

fn patience() -> Duration {
    Duration::from_millis(PATIENCE_MS.load(Ordering::Relaxed))
}

/// Whether laws print their seeds.
static SAYS_SEEDS: AtomicBool = AtomicBool::new(true);

/// From now on laws print nothing: their standard output is that of a program.
pub fn say_no_seeds() {
    SAYS_SEEDS.store(false, Ordering::Relaxed);
}

pub(super) fn says_seeds() -> bool {
    SAYS_SEEDS.load(Ordering::Relaxed)
}

/// Waits for something that must happen.
pub async fn soon<F: Future>(what: &str, work: F) -> F::Output {
    match tokio::time::timeout(patience(), work).await {
        Ok(done) => done,
        Err(_) => panic!("it did not happen: {what}"),
    }
}

/// Waits until `check` is true.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut check: impl FnMut() -> F) {
    let until_true = async {
        while !check().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(what, until_true).await;
}

/// A name that is fine.
pub fn name(text: &str) -> LockName {
    LockName::new(text).expect("a good name")
}

/// A new owner.
pub fn owner() -> Owner {
    Owner::from_bytes(random_128())
}

/// An exclusive ask for one name with a new attempt, a long ttl and no patience.
pub fn request(text: &str) -> LockRequest {
    request_all(&[text])
}

/// The same for several names.
pub fn request_all(texts: &[&str]) -> LockRequest {
    let names = Names::new(texts.iter().map(|text| name(text))).expect("good names");
    let holder = Holder::new(host_name(), std::process::id(), Some("a law".into())).expect("a good holder");
    LockRequest::new(Attempt::from_bytes(random_128()), names, LONG, Arc::new(holder))
}

/// A request with a change.
pub fn with(mut request: LockRequest, change: impl FnOnce(&mut LockRequest)) -> LockRequest {
    change(&mut request);
    request
}

/// Asks; it must be granted.
pub async fn take(store: &Arc<dyn Store>, request: &LockRequest) -> Grant {
    take_with(store, request, "a free lock").await
}

/// The same; `what` is what a law says of this request, and of no other.
pub async fn take_with(store: &Arc<dyn Store>, request: &LockRequest, what: &str) -> Grant {
    match soon("a free lock is granted", store.acquire(request)).await {
        Ok(AcquireOutcome::Granted(grant)) => {
            assert_eq!(grant.key, request.key, "another grant than the one asked for");
            grant
        }
        other => panic!("{what}: {:?} was to be granted: {other:?}", request.key.names),
    }
}

/// Asks without patience; it must be busy.
pub async fn refused(store: &Arc<dyn Store>, request: &LockRequest) -> Busy {
    refused_with(store, request, "a lock that is held").await
}

/// The same; `what` is what a law says of this request, and of no other.
pub async fn refused_with(store: &Arc<dyn Store>, request: &LockRequest, what: &str) -> Busy {
    let request = with(request.clone(), |request| request.wait = Wait::No);
    match soon("a request without a wait is answered", store.acquire(&request)).await {
        Ok(AcquireOutcome::Busy(busy)) => busy,
        other => panic!("{what}: {:?} was to be busy: {other:?}", request.key.names),
    }
}

/// Gives back.
pub async fn give_back(store: &Arc<dyn Store>, key: &RequestKey) -> lockkeeper_core::ReleaseOutcome {
    soon("a release is answered", store.release(key)).await.expect("a release works")
}

/// Requests in the background with an endless wait, and returns when the request is number `place` in the queue of its first
/// name.
pub async fn join_queue(
    store: &Arc<dyn Store>,
    request: &LockRequest,
    place: usize,
) -> JoinHandle<Result<AcquireOutcome>> {
    let request = with(request.clone(), |request| {
        if request.wait == Wait::No {
            request.wait = Wait::Forever;
        }
    });
    let (store2, first) = (store.clone(), request.key.names.first().clone());
    let waiter = tokio::spawn(async move { store2.acquire(&request).await });
    queue_reaches(store, &first, place).await;
    waiter
}

/// Waits until the queue has exactly `count` waiters. On a store without a queue it gives them time to begin.
pub async fn queue_reaches(store: &Arc<dyn Store>, name: &LockName, count: usize) {
    if polls(store) {
        return tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eventually(&format!("{count} wait for {name}"), || async {
        let view = store.inspect(name).await.expect("inspect works");
        view.map_or(0, |view| view.waiting) == count
    })
    .await;
}

/// Waits until the queue has a waiter, or `waiter` has ended, which a law that needs the wait then notices.
pub async fn waits_or_ends<T>(store: &Arc<dyn Store>, name: &LockName, waiter: &JoinHandle<T>) {
    if polls(store) {
        return tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eventually("a request waits, or is answered", || async {
        let view = store.inspect(name).await.expect("inspect works");
        waiter.is_finished() || view.is_some_and(|view| view.waiting == 1)
    })
    .await;
}

/// Whether the store has no queue: waiters poll, and are granted in any order.
pub fn polls(store: &Arc<dyn Store>) -> bool {
    store.profile().waiting == WaitOrder::Poll
}

/// Gives back `held`, and whatever is granted to those who wait until all were served: in any order, never two at once.
pub async fn serve_all(
    store: &Arc<dyn Store>,
    held: Grant,
    mut waiters: Vec<JoinHandle<Result<AcquireOutcome>>>,
) {
    let (mut holds, mut last) = (held.key, held.fence);
    while !waiters.is_empty() {
        give_back(store, &holds).await;
        eventually("a waiter is granted", || async { waiters.iter().any(JoinHandle::is_finished) }).await;
        let first = waiters.iter().position(JoinHandle::is_finished).expect("a waiter was granted");
        let served = granted(waiters.swap_remove(first)).await;
        assert!(served.fence > last, "{served:?} is not newer than {last}");
        // Long enough for the store to grant a second one, if it does.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiters.iter().any(JoinHandle::is_finished), "two were served");
        (holds, last) = (served.key, served.fence);
    }
    give_back(store, &holds).await;
}

/// The grant of a waiter in the background.
pub async fn granted(waiter: JoinHandle<Result<AcquireOutcome>>) -> Grant {
    match soon("a waiter is served", waiter).await.expect("the waiter ends well") {
        Ok(AcquireOutcome::Granted(grant)) => grant,
        other => panic!("a waiter was to be served: {other:?}"),
    }
}

/// The lock has no holder, no waiter and no lock-delay.
pub async fn is_free(store: &Arc<dyn Store>, text: &str) {
    is_free_after(store, text, "all that was done").await;
}

/// The same; `what` is what a law says was before, and nowhere else.
pub async fn is_free_after(store: &Arc<dyn Store>, text: &str, what: &str) {
    let name = name(text);
    eventually(&format!("{text} is free after {what}"), || async {
        store.inspect(&name).await.expect("inspect works").is_none()
    })
    .await;
}

/// Does `work` while time passes: nothing else advances a virtual clock.
pub async fn while_time_passes<H: super::Harness, F: Future>(h: &H, work: F) -> F::Output {
    let passing = async {
        loop {
            h.pass(Duration::from_millis(20)).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        done = work => done,
        () = passing => unreachable!("time never ends"),
    }
}
