//! What `once` does if the store is unreachable when the result is to be stored.
#![cfg(feature = "memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkeeper::once::{OnceStart, RunPermit, Stored};

use lockkeeper::store::VirtualClock;
use lockkeeper::{Error, Lockkeeper, Result, Store, SystemClock};
use lockkeeper_core::{
    AcquireOutcome, Expect, Grant, LockName, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey as Names,
    WriteOutcome,
};
use lockkeeper_memory::MemoryStore;
use lockkeeper_testkit::laws::interposed::{Fate, Interposed};

/// A store that refuses the next few writes.
struct FailingWrites {
    store: Arc<dyn Store>,
    refuses: AtomicU32,
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
        let refused =
            self.refuses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        match refused {
            Ok(_) => Err(Error::Unavailable("unreachable".into())),
            Err(_) => self.store.write(key, value, expect, ttl).await,
        }
    }
});

async fn begun(ttl: Duration) -> (Lockkeeper, Arc<FailingWrites>, Box<RunPermit>) {
    let store = Lockkeeper::open("memory:").await.unwrap().store().clone();
    let failing = Arc::new(FailingWrites { store, refuses: AtomicU32::new(0) });
    let keeper = Lockkeeper::with_store(failing.clone(), Arc::new(SystemClock));
    let OnceStart::Run(turn) = keeper.once("k").ttl(ttl).claim().await.unwrap() else {
        panic!("no other caller runs")
    };
    (keeper, failing, turn)
}

fn result() -> Stored {
    Stored { ok: true, bytes: b"paid".to_vec() }
}

#[tokio::test]
async fn a_result_is_stored_although_the_store_was_unreachable_for_a_moment() {
    let (keeper, failing, turn) = begun(Duration::from_secs(600)).await;
    failing.refuses.store(5, Ordering::SeqCst);
    turn.finish(result()).await.unwrap();
    assert_eq!(failing.refuses.load(Ordering::SeqCst), 0);
    assert_eq!(keeper.once("k").result().await.unwrap().unwrap().result, result());
}

#[tokio::test]
async fn a_store_that_stays_unreachable_is_reported_and_the_next_caller_runs() {
    // Longer than a slow machine stalls: a lost lease is reported as lost.
    let (keeper, failing, turn) = begun(Duration::from_secs(5)).await;
    let old = turn.fence();
    // Renewals still work, so the lease would last for ever: it is given up after a ttl all the same.
    failing.refuses.store(u32::MAX, Ordering::SeqCst);
    let told = turn.finish(result()).await;
    assert!(matches!(told, Err(Error::Unavailable(_))), "{told:?}");
    failing.refuses.store(0, Ordering::SeqCst);
    assert_eq!(keeper.once("k").result().await.unwrap(), None);
    let OnceStart::Run(next) = keeper.once("k").claim().await.unwrap() else { panic!("nothing was kept") };
    assert!(next.fence() > old);
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
