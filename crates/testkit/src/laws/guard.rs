//! The guards of the library over a store: they report a loss in time, and a caller may drop their futures anywhere.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use lockkeeper::{Error, Guarantee, LeaseState, LossReason, ReleaseOutcome};
use lockkeeper_core::faults::Guarantees;

use super::*;

/// Long enough to be renewed in time on a busy machine.
const TTL: Duration = Duration::from_secs(3);

pub async fn a_guard_outlives_its_ttl<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    let guard = keeper.lock("orders/42").ttl(TTL).acquire().await.unwrap();
    for _ in 0..8 {
        h.pass(TTL / 4).await;
        keeper.quiesce().await;
    }
    let busy = refused_with(&other, &request("orders/42"), "a lock with a guard").await;
    assert_eq!(busy.held[0].fence, guard.fence());
    assert!(guard.is_held(), "{guard:?}");
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    take(&other, &request("orders/42")).await;
}

/// The store cannot be reached for half of a ttl. The guard is renewed when it can be reached again, and from then on as before.
pub async fn a_guard_outlives_a_short_outage<H: Harness>(h: H) {
    let (client, other) = (h.client().await, h.client().await);
    let cut = Arc::new(Cut { store: client, off: AtomicBool::new(false) });
    let keeper = Lockkeeper::with_store(cut.clone(), h.clock());
    let ttl = TTL * 2;
    let guard = keeper.lock("orders/42").ttl(ttl).acquire().await.unwrap();
    cut.off.store(true, Ordering::SeqCst);
    for _ in 0..5 {
        h.pass(ttl / 10).await;
        keeper.quiesce().await;
    }
    cut.off.store(false, Ordering::SeqCst);
    for _ in 0..12 {
        h.pass(ttl / 8).await;
        keeper.quiesce().await;
    }
    let busy =
        refused_with(&other, &request("orders/42"), "a lock that was renewed again after an outage").await;
    assert_eq!(busy.held[0].fence, guard.fence());
    assert!(guard.is_held(), "{guard:?}");
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    take(&other, &request("orders/42")).await;
}

/// How many guards of one shared lock a process has.
const MANY: usize = 200;

/// Where one item or key has all holders of a lock, their renewals must not compete for it.
pub async fn many_guards_of_one_lock_do_not_cost_each_other_the_lock<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    if !keeper.profile().shared {
        return;
    }
    // Long enough for all of them to be let in within a third of it on a busy machine.
    let ttl = TTL * 4;
    let shared = || keeper.lock("orders/42").shared().ttl(ttl).acquire();
    let guards = futures_util::future::join_all((0..MANY).map(|_| shared())).await;
    let guards: Vec<_> = guards.into_iter().map(|guard| guard.expect("no holder excludes it")).collect();
    for _ in 0..5 {
        h.pass(ttl / 4).await;
        keeper.quiesce().await;
    }
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    assert_eq!(held, MANY, "guards of one process cost each other the lock");
    refused(&other, &request("orders/42")).await;
    drop(guards);
    keeper.settle().await;
    take(&other, &request("orders/42")).await;
}

pub async fn a_dropped_guard_frees_its_lock<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    drop(keeper.lock("orders/42").ttl(LONG).acquire().await.unwrap());
    is_free_after(&other, "orders/42", "a dropped guard").await;
    // Also outside of any runtime.
    let guard = keeper.lock("orders/42").ttl(LONG).acquire().await.unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    is_free(&other, "orders/42").await;
    // Also when the release is cut off in the middle.
    let guard = keeper.lock("orders/42").ttl(LONG).acquire().await.unwrap();
    drop(guard.release());
    is_free(&other, "orders/42").await;
}

/// Polls a future `polls` times and drops it. True if it came to its end before.
async fn poll_and_drop<F: Future>(work: F, polls: usize) -> bool {
    let mut work = pin!(work);
    for _ in 0..polls {
        let ready =
            std::future::poll_fn(|cx: &mut Context<'_>| Poll::Ready(work.as_mut().poll(cx).is_ready())).await;
        if ready {
            return true;
        }
        // Let the task that it waits for go on, so that the next poll finds it further.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    false
}

pub async fn a_cancelled_acquire_leaves_nothing<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    // A free lock: dropped before the first poll, after it, and so on until it comes through.
    for polls in 0.. {
        let finished = poll_and_drop(keeper.lock("orders/42").ttl(LONG).acquire(), polls).await;
        is_free_after(&other, "orders/42", "a cancelled acquire").await;
        if finished {
            break;
        }
    }
    // A lock that is held, then released while the request is in the queue.
    for polls in 0..4 {
        let held = take(&other, &request("orders/42")).await;
        let request = keeper.lock("orders/42").ttl(LONG).acquire();
        assert!(!poll_and_drop(request, polls).await, "two hold it");
        let waiting = keeper.clone();
        let waiter =
            tokio::spawn(async move { waiting.lock("orders/42").ttl(LONG).acquire().await.map(drop) });
        if polls % 2 == 0 {
            waiter.abort();
        }
        give_back(&other, &held.key).await;
        // Aborted or served: what it leaves is looked at when it is over, wherever it was. Before that the lock may look free while
        // what it has asked for is still under way.
        let _ = soon("orders/42 is free after a cancelled acquire, so the waiter ends", waiter).await;
        keeper.settle().await;
        is_free_after(&other, "orders/42", "a cancelled acquire").await;
    }
}

pub async fn loss_is_told_before_anyone_else_gets_in<H: Harness>(h: H) {
    let (client, other) = (h.client().await, h.client().await);
    // Its renewals never arrive: the holder is cut off and does not know it.
    let cut = Arc::new(Cut { store: client, off: AtomicBool::new(false) });
    let keeper = Lockkeeper::with_store(cut.clone(), h.clock());
    let guard = keeper.lock("orders/42").ttl(TTL).acquire().await.unwrap();
    cut.off.store(true, Ordering::SeqCst);
    let clock = h.clock();
    let rival = tokio::spawn(async move {
        let patient = with(request("orders/42"), |request| request.wait = lockkeeper_core::Wait::Forever);
        let granted = other.acquire(&patient).await;
        (granted, clock.now())
    });
    let deadline = guard.deadline();
    for _ in 0..12 {
        h.pass(TTL / 10).await;
        keeper.quiesce().await;
    }
    let (granted, when) = soon("the rival is served", rival).await.unwrap();
    assert!(matches!(granted, Ok(lockkeeper_core::AcquireOutcome::Granted(_))));
    assert!(deadline < when, "the rival was served while the guard still believed");
    let loss = soon("the loss is told", guard.lost()).await;
    assert!(matches!(loss, Error::Lost(_)));
    let unreachable = Error::Unavailable("cut off".into()).to_string();
    assert_eq!(
        (guard.is_held(), guard.state()),
        (false, LeaseState::Lost(LossReason::Unreachable(unreachable.into())))
    );
}

/// A store that cannot be reached for renewals and releases when it is off.
struct Cut {
    store: Arc<dyn Store>,
    off: AtomicBool,
}

crate::forward!(Cut, {
    async fn acquire(
        &self,
        request: &lockkeeper_core::LockRequest,
    ) -> lockkeeper::Result<lockkeeper_core::AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(
        &self,
        grants: &[lockkeeper_core::Grant],
    ) -> lockkeeper::Result<Vec<lockkeeper_core::RenewOutcome>> {
        if self.off.load(Ordering::SeqCst) {
            return Err(Error::Unavailable("cut off".into()));
        }
        self.store.renew(grants).await
    }
    async fn release(&self, key: &lockkeeper_core::RequestKey) -> lockkeeper::Result<ReleaseOutcome> {
        if self.off.load(Ordering::SeqCst) {
            return Err(Error::Unavailable("cut off".into()));
        }
        self.store.release(key).await
    }
});

pub async fn a_broken_guard_is_told_so<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    let guard = keeper.lock("orders/42").ttl(TTL).acquire().await.unwrap();
    other.break_lock(&name("orders/42"), "to see").await.unwrap();
    h.pass(TTL / 2).await;
    keeper.quiesce().await;
    eventually("the break is told", || async { guard.state() == LeaseState::Lost(LossReason::Taken) }).await;
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyGone);
}

pub async fn a_revoked_guard_is_told_why_and_gives_back<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    if !keeper.profile().revoke {
        assert!(matches!(keeper.revoke("orders/42", "drained").await, Err(Error::Unsupported(_))));
        return;
    }
    let guard = keeper.lock("orders/42").ttl(TTL).acquire().await.unwrap();
    let waiter = join_queue(&other, &request("orders/42"), 1).await;
    other.revoke(&name("orders/42"), "the host is drained").await.unwrap();
    h.pass(TTL / 2).await;
    keeper.quiesce().await;
    let ran = soon("the work is ended", guard.run(std::future::pending::<()>())).await;
    assert!(
        matches!(&ran, Err(Error::Lost(why)) if why.contains("the host is drained")),
        "the reason is not told: {ran:?}"
    );
    assert_eq!(guard.state(), LeaseState::Lost(LossReason::Revoked("the host is drained".into())));
    assert!(!waiter.is_finished(), "the next one was let in before the holder had stopped");
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    granted(waiter).await;
}

pub async fn max_hold_and_missing_progress_end_a_guard<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    let capped = keeper.lock("a").ttl(TTL).max_hold(TTL * 3 / 2).acquire().await.unwrap();
    let stuck = keeper.lock("b").ttl(TTL).progress_within(TTL / 2).acquire().await.unwrap();
    let busy = keeper.lock("c").ttl(TTL).progress_within(TTL / 2).acquire().await.unwrap();
    for _ in 0..20 {
        h.pass(TTL / 8).await;
        busy.progress();
        keeper.quiesce().await;
    }
    assert_eq!(capped.state(), LeaseState::Lost(LossReason::MaxHold), "the longest hold is over");
    assert_eq!(stuck.state(), LeaseState::Lost(LossReason::Stalled));
    assert!(busy.is_held(), "{busy:?}");
    for text in ["a", "b"] {
        take(&other, &request(text)).await;
    }
    refused(&other, &request("c")).await;
}

pub async fn work_is_ended_before_the_deadline<H: Harness>(h: H) {
    let (client, other) = (h.client().await, h.client().await);
    let cut = Arc::new(Cut { store: client, off: AtomicBool::new(false) });
    let keeper = Lockkeeper::with_store(cut.clone(), h.clock());
    let guard = keeper.lock("orders/42").ttl(TTL).acquire().await.unwrap();
    assert_eq!(guard.run(async { 7 }).await.unwrap(), 7);
    cut.off.store(true, Ordering::SeqCst);
    struct Ended(Arc<dyn Clock>, Arc<std::sync::Mutex<Option<lockkeeper::BootInstant>>>);
    impl Drop for Ended {
        fn drop(&mut self) {
            *self.1.lock().unwrap() = Some(self.0.now());
        }
    }
    let ended = Arc::new(std::sync::Mutex::new(None));
    let work = Ended(h.clock(), ended.clone());
    let never = async move {
        let _work = work;
        std::future::pending::<()>().await
    };
    let deadline = guard.deadline();
    let run = tokio::spawn(async move { guard.run(never).await });
    let mut left = 20;
    while !run.is_finished() && left > 0 {
        h.pass(TTL / 20).await;
        keeper.quiesce().await;
        tokio::time::sleep(Duration::from_millis(2)).await;
        left -= 1;
    }
    let answer = soon("the work is ended within the ttl", run).await.unwrap();
    assert!(matches!(answer, Err(Error::Lost(_))), "{answer:?}");
    let ended = ended.lock().unwrap().expect("the work was dropped");
    assert!(ended < deadline, "the work ran on past the deadline");
    // And the store agrees that the deadline was in time.
    let view = other.inspect(&name("orders/42")).await.unwrap();
    assert!(view.is_none_or(|view| view.waiting == 0));
    let fresh = h.keeper().await.lock("x").ttl(TTL).acquire().await.unwrap();
    assert!(fresh.deadline() < h.clock().now() + TTL, "a deadline beyond the ttl");
}

pub async fn lock_all_is_one_guard<H: Harness>(h: H) {
    let (keeper, other) = (h.keeper().await, h.client().await);
    if !keeper.profile().multi_name {
        assert!(matches!(keeper.lock_all(["a", "b"]).acquire().await, Err(Error::Unsupported(_))));
        return;
    }
    let guard = keeper.lock_all(["b", "a", "b"]).ttl(LONG).acquire().await.unwrap();
    assert_eq!(guard.names().as_slice(), [name("a"), name("b")]);
    for text in ["a", "b"] {
        assert_eq!(
            refused_with(&other, &request(text), "a name of the guard").await.held[0].fence,
            guard.fence()
        );
    }
    assert!(keeper.lock_all(["a", "c"]).try_acquire().await.unwrap().is_none());
    is_free(&other, "c").await;
    guard.release().await.unwrap();
    is_free(&other, "a").await;
    assert!(matches!(keeper.lock_all(Vec::<String>::new()).acquire().await, Err(Error::Invalid(_))));
    assert!(matches!(keeper.lock("").acquire().await, Err(Error::Invalid(_))));
}

pub async fn correctness_is_refused_where_it_is_not_kept<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    let profile = keeper.profile();
    assert!(!profile.findings.is_empty(), "a store says what it does not promise");
    let answer = keeper.lock("orders/42").for_correctness().try_acquire().await;
    if H::for_correctness() {
        assert!(answer.unwrap().is_some());
        assert_eq!((profile.fence, profile.durable), (Guarantee::Kept, Guarantee::Kept));
    } else {
        match answer {
            Err(Error::Unsupported(reason)) => assert!(reason.contains(&profile.store), "{reason}"),
            other => panic!("correctness was to be refused: {other:?}"),
        }
    }
    if !profile.deployments.is_empty() {
        let declared = (profile.exclusion, profile.fence, profile.durable);
        let Guarantees { exclusion, fence, durable } = Guarantees::of(profile.deployments);
        assert_eq!(declared, (exclusion, fence, durable), "the profile differs from the table of faults");
    }
    assert!(keeper.lock("orders/43").for_efficiency().try_acquire().await.unwrap().is_some());
}
