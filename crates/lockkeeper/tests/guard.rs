//! What a guard does when its store fails: hangs, loses replies, answers late, or panics.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::{Clock, Error, LeaseState, Lockkeeper, LossReason, ReleaseOutcome, Result, Store};
use lockkeeper_core::{AcquireOutcome, Attempt, Grant, LockRequest, RenewOutcome, RequestKey};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;
use lockkeeper_testkit::SimulatedKeeper;
use tokio::sync::Semaphore;

const TTL: Duration = Duration::from_secs(30);

/// The memory store with a list of the calls that it received, and a switch for each kind of failure.
struct FaultyStore {
    store: Arc<dyn Store>,
    renewals: Mutex<Vec<Vec<Attempt>>>,
    attempts: Mutex<Vec<Attempt>>,
    releases: AtomicUsize,
    hang: AtomicBool,
    /// Renewals keep their thread.
    block: AtomicBool,
    panic: AtomicBool,
    /// How many replies are lost after the store has carried out the request.
    lose_replies: AtomicUsize,
    late: AtomicBool,
    /// The store is unreachable from the second call on.
    unreachable: AtomicBool,
}

impl FaultyStore {
    fn loses_this_reply(&self) -> bool {
        self.lose_replies.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok()
    }
}

lockkeeper_testkit::forward!(FaultyStore, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let before = {
            let mut attempts = self.attempts.lock().unwrap();
            attempts.push(request.key.attempt);
            attempts.len() - 1
        };
        if self.unreachable.load(SeqCst) && before > 0 {
            return Err(Error::Unavailable("unreachable".into()));
        }
        let mut answer = self.store.acquire(request).await?;
        if self.loses_this_reply() {
            return Err(Error::Unknown("the connection was cut".into()));
        }
        if let (true, AcquireOutcome::Granted(grant)) = (self.late.load(SeqCst), &mut answer) {
            grant.sent_at = grant.sent_at.before(grant.ttl);
        }
        Ok(answer)
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.renewals.lock().unwrap().push(grants.iter().map(|grant| grant.key.attempt).collect());
        assert!(!self.panic.load(SeqCst), "planted");
        while self.block.load(SeqCst) {
            std::thread::park();
        }
        if self.hang.load(SeqCst) {
            std::future::pending::<()>().await;
        }
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.releases.fetch_add(1, SeqCst);
        if self.loses_this_reply() {
            return Err(Error::Unknown("the connection was cut".into()));
        }
        self.store.release(key).await
    }
});

fn faulty() -> (VirtualClock, Arc<FaultyStore>, Lockkeeper) {
    let clock = VirtualClock::default();
    let faulty = Arc::new(FaultyStore {
        store: Arc::new(MemoryStore::new(Arc::new(clock.clone()))),
        renewals: Mutex::default(),
        attempts: Mutex::default(),
        releases: AtomicUsize::new(0),
        hang: AtomicBool::new(false),
        block: AtomicBool::new(false),
        panic: AtomicBool::new(false),
        lose_replies: AtomicUsize::new(0),
        late: AtomicBool::new(false),
        unreachable: AtomicBool::new(false),
    });
    let keeper = Lockkeeper::with_store(faulty.clone(), Arc::new(clock.clone()));
    (clock, faulty, keeper)
}

async fn pass(clock: &VirtualClock, keeper: &Lockkeeper, time: Duration) {
    keeper.quiesce().await;
    let mut left = time;
    while !left.is_zero() {
        left = clock.step(left);
        keeper.quiesce().await;
    }
}

async fn soon<F: Future>(work: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), work).await.expect("it happens")
}

#[tokio::test]
async fn all_guards_of_a_process_are_renewed_in_one_batch() {
    let (clock, faulty, keeper) = faulty();
    let mut guards = Vec::new();
    for i in 0..1000 {
        guards.push(keeper.lock(format!("lock/{i}")).ttl(TTL).acquire().await.unwrap());
    }
    pass(&clock, &keeper, TTL * 10).await;
    assert!(guards.iter().all(|guard| guard.is_held()));
    let batches: Vec<usize> = faulty.renewals.lock().unwrap().iter().map(Vec::len).collect();
    // Thirty thirds of a ttl have passed, a little more with the jitter: as many batches, each with all of them.
    assert!((29..=36).contains(&batches.len()), "{batches:?}");
    assert!(batches.iter().all(|size| *size == 1000), "{batches:?}");
}

#[tokio::test]
async fn a_hung_store_does_not_delay_the_loss() {
    let (clock, faulty, keeper) = faulty();
    let guard = keeper.lock("x").ttl(TTL).acquire().await.unwrap();
    faulty.hang.store(true, SeqCst);
    pass(&clock, &keeper, TTL * 5 / 6).await;
    assert_eq!(guard.state(), LeaseState::Jeopardy);
    let deadline = guard.deadline();
    pass(&clock, &keeper, deadline.since(clock.now())).await;
    assert!(matches!(soon(guard.lost()).await, Error::Lost(_)));
    assert_eq!(clock.now(), deadline, "not a moment later");
}

#[tokio::test]
async fn a_blip_is_jeopardy_and_then_valid_again() {
    let rehearsal = SimulatedKeeper::new();
    let guard = rehearsal.keeper().lock("x").ttl(TTL).acquire().await.unwrap();
    rehearsal.cut();
    rehearsal.pass(TTL / 2).await;
    assert_eq!(guard.state(), LeaseState::Jeopardy);
    rehearsal.heal();
    rehearsal.pass(TTL / 6).await;
    assert_eq!(guard.state(), LeaseState::Valid);
    rehearsal.pass(TTL * 10).await;
    assert!(guard.is_held());
    rehearsal.cut();
    rehearsal.pass(TTL).await;
    assert!(matches!(guard.state(), LeaseState::Lost(LossReason::Unreachable(_))), "{guard:?}");
}

// A process that was killed starts again with the attempt that it had written down, and finds that an operator wants the lock back.
#[tokio::test]
async fn an_attempt_that_was_revoked_is_released_and_not_resumed() {
    let (_clock, faulty, keeper) = faulty();
    let attempt = Lockkeeper::new_attempt();
    std::mem::forget(keeper.lock("x").ttl(TTL).attempt(attempt).acquire().await.unwrap());
    keeper.revoke("x", "the host is drained").await.unwrap();
    let resumed = keeper.lock("x").ttl(TTL).attempt(attempt).acquire().await;
    assert!(matches!(&resumed, Err(Error::Lost(why)) if why.contains("drained")), "{resumed:?}");
    soon(keeper.settle()).await;
    assert_eq!(faulty.store.inspect(&"x".parse().unwrap()).await.unwrap(), None);
}

// Work that keeps its thread busy cannot be dropped in time; then at least it is not called a success.
#[tokio::test]
async fn work_that_ends_after_the_deadline_is_no_success() {
    let (clock, _faulty, keeper) = faulty();
    let guard = keeper.lock("x").ttl(TTL).max_hold(TTL / 2).acquire().await.unwrap();
    let ran = guard.run(async { clock.jump(TTL) }).await;
    assert!(matches!(&ran, Err(Error::Lost(why)) if why.contains("max-hold")), "{ran:?}");
}

// A caller that writes one `?` gets the work's own error, and the loss of the lock as the same type.
#[tokio::test]
async fn work_that_can_fail_needs_one_question_mark() {
    #[derive(Debug)]
    enum Trouble {
        Lock(Error),
        Declined,
    }
    impl From<Error> for Trouble {
        fn from(error: Error) -> Self {
            Trouble::Lock(error)
        }
    }
    let (clock, _faulty, keeper) = faulty();
    let guard = keeper.lock("x").ttl(TTL).max_hold(TTL / 2).acquire().await.unwrap();
    assert_eq!(guard.try_run(async { Ok::<_, Trouble>(7) }).await.unwrap(), 7);
    let failed = guard.try_run(async { Err::<(), _>(Trouble::Declined) }).await;
    assert!(matches!(failed, Err(Trouble::Declined)), "{failed:?}");
    // Work that fails after the lock was lost: the loss is what the caller has to act on.
    let late = async {
        clock.jump(TTL);
        Err::<(), _>(Trouble::Declined)
    };
    let lost = guard.try_run(late).await;
    assert!(matches!(&lost, Err(Trouble::Lock(Error::Lost(why))) if why.contains("max-hold")), "{lost:?}");
}

#[tokio::test]
async fn a_holder_without_a_label_is_called_by_the_name_of_its_process() {
    let (_clock, _faulty, keeper) = faulty();
    let program = std::env::args().next().unwrap();
    let name = std::path::Path::new(&program).file_name().unwrap().to_str().unwrap().to_owned();
    let guard = keeper.lock("x").acquire().await.unwrap();
    let seen = keeper.inspect("x").await.unwrap().unwrap();
    assert_eq!(seen.held[0].holder.label.as_ref(), Some(&name));
    guard.release().await.unwrap();
    let guard = keeper.lock("x").label("nightly settlement").acquire().await.unwrap();
    let seen = keeper.inspect("x").await.unwrap().unwrap();
    assert_eq!(seen.held[0].holder.label.as_deref(), Some("nightly settlement"));
    guard.release().await.unwrap();
}

// A store that blocks the thread that renews: it can neither renew nor report anything. The deadline passes all the same.
#[tokio::test]
async fn a_loss_is_reported_though_the_renewing_thread_is_stuck() {
    let (clock, faulty, keeper) = faulty();
    let guard = keeper.lock("x").ttl(TTL).acquire().await.unwrap();
    keeper.quiesce().await;
    faulty.block.store(true, SeqCst);
    let lost = tokio::spawn(async move { guard.lost().await });
    while faulty.renewals.lock().unwrap().is_empty() {
        clock.advance(TTL / 30);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    clock.advance(TTL);
    assert!(matches!(soon(lost).await.unwrap(), Error::Lost(_)));
}

#[tokio::test]
async fn a_panic_of_the_renewing_thread_loses_its_guards() {
    let (clock, faulty, keeper) = faulty();
    let guard = keeper.lock("x").ttl(TTL).acquire().await.unwrap();
    faulty.panic.store(true, SeqCst);
    clock.advance(TTL / 3);
    assert!(matches!(soon(guard.lost()).await, Error::Lost(_)));
    assert_eq!(guard.state(), LeaseState::Lost(LossReason::Abandoned));
    // What comes after it is lost from the start, and said so.
    let error = keeper.lock("y").ttl(TTL).acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(text) if text.contains("anew")), "{error:?}");
}

#[tokio::test]
async fn an_unknown_outcome_is_retried_with_the_same_attempt() {
    let (clock, faulty, keeper) = faulty();
    faulty.lose_replies.store(2, SeqCst);
    let asked = tokio::spawn(async move { keeper.lock("x").ttl(TTL).acquire().await });
    while !asked.is_finished() {
        clock.advance(Duration::from_millis(10));
        tokio::task::yield_now().await;
    }
    let guard = asked.await.unwrap().unwrap();
    let attempts = faulty.attempts.lock().unwrap().clone();
    assert_eq!(attempts, vec![attempts[0]; 3]);
    let view = faulty.store.inspect(guard.names().first()).await.unwrap().unwrap();
    assert_eq!(view.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [guard.fence()]);
}

#[tokio::test]
async fn unavailable_on_a_retry_does_not_settle_the_first_request() {
    let (clock, faulty, keeper) = faulty();
    faulty.lose_replies.store(1, SeqCst);
    faulty.unreachable.store(true, SeqCst);
    let requests = keeper.clone();
    let asked = tokio::spawn(async move { requests.lock("x").ttl(TTL).acquire().await });
    while !asked.is_finished() {
        clock.advance(Duration::from_millis(10));
        tokio::task::yield_now().await;
    }
    // The first one had been granted.
    let told = asked.await.unwrap();
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    soon(keeper.settle()).await;
    assert_eq!(faulty.releases.load(SeqCst), 1, "it is given back");
}

#[tokio::test]
async fn a_release_that_failed_is_tried_again_in_the_background() {
    let (clock, faulty, keeper) = faulty();
    let guard = keeper.lock("x").ttl(TTL).acquire().await.unwrap();
    let name = guard.names().first().clone();
    faulty.lose_replies.store(2, SeqCst);
    assert!(matches!(guard.release().await, Err(Error::Unknown(_))));
    pass(&clock, &keeper, Duration::from_secs(1)).await;
    soon(keeper.settle()).await;
    assert_eq!(faulty.releases.load(SeqCst), 3);
    assert_eq!(faulty.store.inspect(&name).await.unwrap(), None);
}

#[tokio::test]
async fn nothing_is_renewed_after_its_release() {
    let (clock, faulty, keeper) = faulty();
    for _ in 0..50 {
        let released = keeper.lock("x").ttl(TTL).acquire().await.unwrap();
        released.release().await.unwrap();
        drop(keeper.lock("y").ttl(TTL).acquire().await.unwrap());
    }
    pass(&clock, &keeper, TTL * 3).await;
    assert_eq!(*faulty.renewals.lock().unwrap(), Vec::<Vec<Attempt>>::new());
}

#[tokio::test]
async fn a_grant_that_comes_after_its_own_deadline_is_given_back() {
    let (_clock, faulty, keeper) = faulty();
    faulty.late.store(true, SeqCst);
    let late = keeper.lock("x").ttl(TTL).acquire().await;
    assert!(matches!(late, Err(Error::Unavailable(_))), "{late:?}");
    soon(keeper.settle()).await;
    assert_eq!(faulty.releases.load(SeqCst), 1);
}

#[tokio::test]
async fn half_given_and_absurd_options_are_refused() {
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let invalid =
        |answer: Result<lockkeeper::Guard>| assert!(matches!(answer, Err(Error::Invalid(_))), "{answer:?}");
    invalid(keeper.lock("x").ttl(Duration::ZERO).acquire().await);
    invalid(keeper.lock("x").ttl(Duration::MAX).acquire().await);
    invalid(keeper.lock("x").max_hold(Duration::ZERO).acquire().await);
    invalid(keeper.lock("x").min_hold(TTL).max_hold(TTL / 2).acquire().await);
    invalid(keeper.lock("x").permits(0).acquire().await);
    invalid(keeper.lock("x").label("two\nlines").acquire().await);
    invalid(keeper.lock("a\0b").acquire().await);
    assert!(keeper.inspect("x").await.unwrap().is_none());
    for url in [
        "",
        "memory",
        "memory:x",
        "sqlite:",
        "redis://",
        "redlock://a,b",
        "etcd://",
        "zk://",
        "nosuch:x",
        ":",
        "sqlite:?",
        "sqlite:/a?b=c",
    ] {
        let answer = Lockkeeper::open(url).await;
        assert!(matches!(answer, Err(Error::Invalid(_))), "{url:?}: {answer:?}");
    }
}

/// The lock of a holder that could not stop its work was released at once, and the next one worked beside it.
#[tokio::test]
async fn a_guard_that_is_left_to_expire_keeps_its_lock_until_the_lease_ends() {
    let (clock, faulty, keeper) = faulty();
    let guard = keeper.lock("x").ttl(TTL).acquire().await.unwrap();
    guard.let_expire();
    keeper.settle().await;
    assert!(keeper.lock("x").try_acquire().await.unwrap().is_none(), "it was released");
    pass(&clock, &keeper, TTL - Duration::from_secs(1)).await;
    assert!(keeper.lock("x").try_acquire().await.unwrap().is_none(), "the lease was cut short");
    pass(&clock, &keeper, Duration::from_secs(2)).await;
    assert!(keeper.lock("x").try_acquire().await.unwrap().is_some(), "it was renewed");
    assert!(faulty.renewals.lock().unwrap().is_empty());
}

/// A store whose releases wait until the test lets them pass, each name for itself.
struct HeldReleases {
    store: Arc<dyn Store>,
    passes: [Semaphore; 2],
}

lockkeeper_testkit::forward!(HeldReleases, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let pass = &self.passes[usize::from(key.names.first().as_str() == "later")];
        drop(pass.acquire().await.unwrap());
        self.store.release(key).await
    }
});

/// `settle` waited for a moment in which no release at all was in flight. On a busy keeper there is none.
#[tokio::test]
async fn settle_waits_for_the_releases_of_before_and_for_no_later_one() {
    let clock = VirtualClock::default();
    let store = Arc::new(MemoryStore::new(Arc::new(clock.clone())));
    let store = Arc::new(HeldReleases { store, passes: [0, 0].map(Semaphore::new) });
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(clock.clone()));
    let guard = async |name: &str| keeper.lock(name).ttl(TTL).acquire().await.unwrap();
    let (before, later) = (guard("before").await, guard("later").await);
    drop(before);
    let mut settles = std::pin::pin!(keeper.settle());
    assert!(settles.as_mut().now_or_never().is_none());
    drop(later);
    keeper.quiesce().await;
    assert!(settles.as_mut().now_or_never().is_none(), "a release of before is in flight");
    store.passes[0].add_permits(1);
    soon(settles).await;
    assert!(
        keeper.inspect("before").await.unwrap().is_none() && keeper.inspect("later").await.unwrap().is_some()
    );
    store.passes[1].add_permits(1);
    soon(keeper.settle()).await;
    assert!(keeper.inspect("later").await.unwrap().is_none());
}
