//! What the recipes do if the work is done and the store does not take its result.
#![cfg(feature = "memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkeeper::once::{OnceStart, RunPermit, Stored};

use lockkeeper::store::VirtualClock;
use lockkeeper::windows::Window;
use lockkeeper::{Error, Fence, Lockkeeper, Result, Store, SystemClock};
use lockkeeper_core::{
    AcquireOutcome, Expect, Grant, LockName, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey as Names,
    WriteOutcome,
};
use lockkeeper_memory::MemoryStore;
use lockkeeper_testkit::laws::interposed::{Fate, Interposed};

/// A store that refuses the next few writes of records whose names begin so.
struct FailingWrites {
    store: Arc<dyn Store>,
    refuses: AtomicU32,
    names: &'static str,
    error: Error,
}

lockkeeper_testkit::forward_locks!(FailingWrites, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &Names) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
});

lockkeeper_testkit::forward_records!(FailingWrites, {
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let less = |left: u32| left.checked_sub(1);
        let refused = key.as_str().starts_with(self.names)
            && self.refuses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok();
        match refused {
            true => Err(self.error.clone()),
            false => self.store.write(key, value, expect, ttl).await,
        }
    }
});

impl FailingWrites {
    async fn open(names: &'static str, error: Error) -> (Lockkeeper, Arc<FailingWrites>) {
        let store = Lockkeeper::open("memory:").await.unwrap().store().clone();
        let failing = Arc::new(FailingWrites { store, refuses: AtomicU32::new(0), names, error });
        (Lockkeeper::with_store(failing.clone(), Arc::new(SystemClock)), failing)
    }

    fn fail(&self, writes: u32) {
        self.refuses.store(writes, Ordering::SeqCst);
    }
}

fn unreachable() -> Error {
    Error::Unavailable("unreachable".into())
}

/// The errors that a retry does not pass.
fn refusals() -> [Error; 3] {
    [Error::Denied("no".into()), Error::Invalid("no".into()), Error::Unsupported("no".into())]
}

/// It must be this caller's turn.
async fn turn(keeper: &Lockkeeper, ttl: Duration) -> Box<RunPermit> {
    match keeper.once("k").ttl(ttl).claim().await.unwrap() {
        OnceStart::Run(permit) => permit,
        OnceStart::Done(done) => panic!("it was to be this caller's turn: {done:?}"),
    }
}

/// The answer must say that the work was done, and with which fence.
fn was_done(told: &Result<()>, fence: Fence) {
    let says = matches!(told, Err(Error::Unknown(why)) if why.contains(&format!("fence {fence}")));
    assert!(says, "work that was done with fence {fence} is reported as {told:?}");
}

fn result() -> Stored {
    Stored { ok: true, bytes: b"paid".to_vec() }
}

#[tokio::test]
async fn a_result_is_stored_although_the_store_was_unreachable_for_a_moment() {
    let (keeper, failing) = FailingWrites::open("once/", unreachable()).await;
    let turn = turn(&keeper, Duration::from_secs(600)).await;
    failing.fail(5);
    turn.finish(result()).await.unwrap();
    assert_eq!(failing.refuses.load(Ordering::SeqCst), 0);
    assert_eq!(keeper.once("k").result().await.unwrap().unwrap().result, result());
}

/// Each of these errors says that the store did nothing, and so the caller learned that nothing was done: a retry charged the card twice.
#[tokio::test]
async fn work_that_was_done_is_not_reported_as_not_done() {
    for error in refusals().into_iter().chain([unreachable()]) {
        let (keeper, failing) = FailingWrites::open("once/", error).await;
        // Longer than a slow machine stalls: a lost lease is reported as lost.
        let permit = turn(&keeper, Duration::from_secs(5)).await;
        let old = permit.fence();
        // Renewals still work, so the lease would last for ever: it is given up after a ttl all the same.
        failing.fail(u32::MAX);
        was_done(&permit.finish(result()).await, old);
        failing.fail(0);
        assert_eq!(keeper.once("k").result().await.unwrap(), None);
        let next = turn(&keeper, Duration::from_secs(30)).await;
        assert!(next.fence() > old, "the next caller runs with a higher fence");
    }
}

/// The store refuses the records with the parts of a large result, and no other.
#[tokio::test]
async fn a_result_whose_parts_are_refused_is_not_done_again() {
    for error in refusals() {
        let (keeper, failing) = FailingWrites::open("once-part/", error).await;
        let permit = turn(&keeper, Duration::from_secs(30)).await;
        let fence = permit.fence();
        failing.fail(u32::MAX);
        was_done(&permit.finish(Stored { ok: true, bytes: vec![7; 100_000] }).await, fence);
        let again = keeper.once("k").claim().await;
        assert!(
            matches!(&again, Err(Error::Unknown(why)) if why.contains("not done again")),
            "what was done is done again: {again:?}"
        );
    }
}

#[tokio::test]
async fn a_window_that_was_run_is_not_reported_as_not_run() {
    for error in refusals().into_iter().chain([unreachable()]) {
        let (keeper, failing) = FailingWrites::open("window/", error).await;
        let guard = keeper.lock("nightly").ttl(Duration::from_secs(5)).acquire().await.unwrap();
        let Window::Ours(run) = keeper.windows("nightly").begin(&guard, 86_400_000).await.unwrap() else {
            panic!("no other host runs it")
        };
        failing.fail(u32::MAX);
        was_done(&run.finish(&guard, 0).await, guard.fence());
    }
}

#[tokio::test]
async fn an_item_that_was_done_is_not_reported_as_not_done() {
    for error in refusals().into_iter().chain([unreachable()]) {
        let (keeper, failing) = FailingWrites::open("claim/", error).await;
        let group = keeper.claim("mail").unwrap().lease(Duration::from_secs(5));
        let item = group.from(["a"]).unwrap().try_take(1).await.unwrap().remove(0);
        let fence = item.fence();
        failing.fail(u32::MAX);
        was_done(&item.complete().await, fence);
    }
}

#[tokio::test]
async fn work_that_requests_its_own_key_gets_deadlock() {
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let (other, inner) = (keeper.clone(), keeper.clone());
    let nested = keeper.once("k").run(|_| async move {
        // Another key is another thing.
        let beside = other.once("j").run(|_| async { Ok::<u64, String>(1) }).await;
        assert!(beside.is_ok(), "{beside:?}");
        let again = inner.once("k").run(|_| async { Ok::<u64, String>(2) }).await;
        Ok::<String, String>(format!("{:?}", again.map(|done| done.result)))
    });
    let told = tokio::time::timeout(Duration::from_secs(20), nested).await.expect("it waits for itself");
    let told = told.unwrap().result.unwrap();
    assert!(told.contains("Deadlock"), "{told}");
    // It is over by now, and has left nothing behind in this task.
    let after = keeper.once("k").run(|_| async { Ok::<String, String>("no".into()) }).await.unwrap();
    assert!(after.replayed && after.result.unwrap() == told);
}

/// The chunks of a large result were kept for a minute longer than the record, counted from their own write. The record's write came after an
/// outage of some minutes: the chunks ended first, and every caller was told that the result is damaged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_chunks_of_a_result_outlive_a_record_that_is_written_late() {
    let minutes = |n: u64| Duration::from_secs(60 * n);
    // The last one is written when the lease is over, and no other caller has taken over.
    for (late, keep) in [(minutes(5), minutes(10)), (minutes(5), minutes(1)), (minutes(20), minutes(1))] {
        let clock = Arc::new(VirtualClock::default());
        let outage = clock.clone();
        let store = Arc::new(MemoryStore::new(clock.clone()));
        // The first write begins the run, the second is the chunk.
        let delayed = Interposed::new(store, Fate::Late, async move { outage.advance(late) }).after(2);
        let keeper = Lockkeeper::with_store(Arc::new(delayed), clock.clone());
        let once = || keeper.once("k").ttl(minutes(10)).keep(keep);
        let OnceStart::Run(permit) = once().claim().await.unwrap() else { panic!("no other caller runs") };
        let large = Stored { ok: true, bytes: vec![7; 100_000] };
        permit.finish(large.clone()).await.unwrap();
        clock.advance(keep - Duration::from_secs(1));
        let found =
            once().result().await.unwrap_or_else(|error| panic!("{late:?} late, kept for {keep:?}: {error}"));
        assert!(found.expect("it is kept").result == large);
        clock.advance(Duration::from_secs(2));
        assert!(once().result().await.unwrap().is_none(), "the record ends after {keep:?}");
    }
}
