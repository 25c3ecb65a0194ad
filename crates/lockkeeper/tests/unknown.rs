//! What the library does when the outcome of a request is unknown.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper::{Clock, Error, Guard, Lockkeeper, ReleaseOutcome, Result, Store};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Grant, LockRequest, RenewOutcome, RequestKey, Wait,
};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;

const TTL: Duration = Duration::from_secs(30);

/// The memory store behind a connection that breaks: the first calls to acquire last for a while, and their outcome is unknown.
struct Broken {
    store: Arc<dyn Store>,
    clock: VirtualClock,
    /// How many calls break, and how long each lasts until then.
    breaks: usize,
    lasts: Duration,
    calls: Mutex<Vec<(BootInstant, Wait)>>,
    attempts: Mutex<Vec<Attempt>>,
    /// No release gets through.
    releases_fail: AtomicBool,
}

lockkeeper_testkit::forward!(Broken, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.attempts.lock().unwrap().push(request.key.attempt);
        let before = {
            let mut calls = self.calls.lock().unwrap();
            calls.push((self.clock.now(), request.wait));
            calls.len() - 1
        };
        if before < self.breaks {
            self.clock.advance(self.lasts);
            return Err(Error::Unknown("the connection was cut".into()));
        }
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        match self.releases_fail.load(SeqCst) {
            true => Err(Error::Unavailable("no server".into())),
            false => self.store.release(key).await,
        }
    }
});

fn broken(breaks: usize, lasts: Duration) -> (VirtualClock, Arc<Broken>, Lockkeeper) {
    let clock = VirtualClock::default();
    let broken = Arc::new(Broken {
        store: Arc::new(MemoryStore::new(Arc::new(clock.clone()))),
        clock: clock.clone(),
        breaks,
        lasts,
        calls: Mutex::default(),
        attempts: Mutex::default(),
        releases_fail: AtomicBool::new(false),
    });
    let keeper = Lockkeeper::with_store(broken.clone(), Arc::new(clock.clone()));
    (clock, broken, keeper)
}

/// Turns the clock until `asked` is answered.
async fn answered(
    clock: &VirtualClock,
    asked: impl Future<Output = Result<Guard>> + Send + 'static,
) -> Result<Guard> {
    let asked = tokio::spawn(asked);
    while !asked.is_finished() {
        clock.advance(Duration::from_millis(10));
        tokio::task::yield_now().await;
    }
    asked.await.unwrap()
}

/// Each retry began the wait anew: a caller that waits for ten seconds was answered after a ttl of thirty.
#[tokio::test]
async fn a_retry_waits_for_what_is_left_of_the_wait() {
    let wait = Duration::from_secs(10);
    let lasts = Duration::from_secs(4);
    let (clock, broken, keeper) = broken(usize::MAX, lasts);
    let told = answered(&clock, keeper.lock("x").ttl(TTL).wait(wait).acquire()).await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    let calls = broken.calls.lock().unwrap().clone();
    let began = calls[0].0;
    assert!(calls.len() >= 3, "it is asked again while the wait lasts: {calls:?}");
    for (at, left) in &calls {
        assert!(matches!(left, Wait::For(left) if *left <= wait - at.since(began).min(wait)), "{calls:?}");
    }
    assert!(calls.last().unwrap().0.since(began) <= wait, "{calls:?}");
}

/// The library gave up a ttl after the first unknown outcome, though the caller was ready to wait for longer: its request lost its
/// position in the queue, or its grant.
#[tokio::test]
async fn a_request_is_retried_until_its_wait_ends() {
    let (ttl, lasts) = (Duration::from_secs(1), Duration::from_secs(2));
    let (clock, broken, keeper) = broken(5, lasts);
    let guard = answered(&clock, keeper.lock("x").ttl(ttl).wait(TTL).acquire()).await.unwrap();
    assert!(guard.is_held());
    let attempts = broken.attempts.lock().unwrap().clone();
    assert_eq!(attempts.len(), 6);
    assert!(attempts.iter().all(|attempt| *attempt == attempts[0]), "the same attempt each time");
}

/// The time for retries counted from the beginning of the wait: the first unknown outcome of a waiter older than its ttl was the last.
#[tokio::test]
async fn a_waiter_older_than_its_ttl_is_retried() {
    let (clock, broken, keeper) = broken(1, TTL * 2);
    let guard = answered(&clock, keeper.lock("x").ttl(TTL).acquire()).await.unwrap();
    assert!(guard.is_held());
    assert_eq!(broken.calls.lock().unwrap().len(), 2);
}

/// A retry that was queued for longer than the ttl and was then cut was the last: the caller lost its position.
#[tokio::test]
async fn a_retry_that_was_queued_for_longer_than_the_ttl_is_retried() {
    let (ttl, lasts) = (Duration::from_secs(10), Duration::from_secs(20));
    let (clock, broken, keeper) = broken(2, lasts);
    let guard = answered(&clock, keeper.lock("x").ttl(ttl).acquire()).await.unwrap();
    assert!(guard.is_held());
    let attempts = broken.attempts.lock().unwrap().clone();
    assert!(attempts.len() == 3 && attempts.iter().all(|attempt| *attempt == attempts[0]), "{attempts:?}");
}

/// A store that never replies makes long calls too.
#[tokio::test]
async fn long_calls_without_a_reply_end_after_a_few_ttls() {
    let (ttl, lasts) = (Duration::from_secs(10), Duration::from_secs(20));
    let (clock, broken, keeper) = broken(usize::MAX, lasts);
    let told = answered(&clock, keeper.lock("x").ttl(ttl).acquire()).await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    let calls = broken.calls.lock().unwrap().len();
    assert!((3..=6).contains(&calls), "{calls} calls");
}

#[tokio::test]
async fn an_unknown_outcome_is_retried_for_a_ttl() {
    let lasts = Duration::from_secs(1);
    let (clock, broken, keeper) = broken(usize::MAX, lasts);
    let told = answered(&clock, keeper.lock("x").ttl(TTL).acquire()).await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    let calls = broken.calls.lock().unwrap().clone();
    let tried = calls.last().unwrap().0.since(calls[0].0 + lasts);
    assert!(tried >= TTL * 3 / 4 && tried <= TTL, "{tried:?}");
}

/// A ttl does not end a queue entry. The driver gave up after a ttl, and the entry stayed for as long as the process lived.
#[tokio::test]
async fn a_queued_request_is_withdrawn_however_long_that_takes() {
    let (clock, broken, keeper) = broken(0, Duration::ZERO);
    let held = keeper.lock("x").ttl(TTL * 100).acquire().await.unwrap();
    let name = held.names().first().clone();
    let waits = keeper.clone();
    let waits = tokio::spawn(async move { waits.lock("x").ttl(TTL).acquire().await });
    let waiting = async || keeper.inspect("x").await.unwrap().unwrap().waiting;
    while waiting().await == 0 {
        tokio::task::yield_now().await;
    }
    broken.releases_fail.store(true, SeqCst);
    waits.abort();
    assert!(waits.await.is_err());
    let settled = keeper.clone();
    let settled = tokio::spawn(async move { settled.settle().await });
    while !settled.is_finished() {
        clock.advance(Duration::from_millis(100));
        keeper.quiesce().await;
    }
    for _ in 0..50 {
        clock.advance(TTL / 10);
        keeper.quiesce().await;
    }
    assert_eq!(waiting().await, 1, "no release got through");
    broken.releases_fail.store(false, SeqCst);
    for _ in 0..50 {
        clock.advance(TTL / 10);
        keeper.quiesce().await;
    }
    let view = keeper.store().inspect(&name).await.unwrap().unwrap();
    assert_eq!((view.waiting, view.held.len()), (0, 1), "the entry is removed: {view:?}");
}
