//! The work was done, and the store is away when its result is to be kept.
#![cfg(feature = "memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkeeper::{Claim, Error, Lockkeeper, Result, Store, Stored, SystemClock, Turn};
use lockkeeper_core::{Acquired, Ask, Claim as Names, Expect, Grant, LockName, Release, Renewal, Write};

/// A store that refuses the next few writes.
struct Away {
    store: Arc<dyn Store>,
    refuses: AtomicU32,
}

lockkeeper_testkit::forward_locks!(Away, {
    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        self.store.acquire(ask).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        self.store.renew(grants).await
    }
    async fn release(&self, claim: &Names) -> Result<Release> {
        self.store.release(claim).await
    }
});

lockkeeper_testkit::forward_records!(Away, {
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        let refused =
            self.refuses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        match refused {
            Ok(_) => Err(Error::Unavailable("away".into())),
            Err(_) => self.store.write(key, value, expect, ttl).await,
        }
    }
});

async fn begun(ttl: Duration) -> (Lockkeeper, Arc<Away>, Box<Turn>) {
    let store = Lockkeeper::open("memory:").await.unwrap().store().clone();
    let away = Arc::new(Away { store, refuses: AtomicU32::new(0) });
    let keeper = Lockkeeper::with_store(away.clone(), Arc::new(SystemClock));
    let Claim::Turn(turn) = keeper.once("k").ttl(ttl).claim().await.unwrap() else {
        panic!("it is our turn")
    };
    (keeper, away, turn)
}

fn result() -> Stored {
    Stored { ok: true, bytes: b"paid".to_vec() }
}

#[tokio::test]
async fn a_result_is_kept_although_the_store_was_away_for_a_moment() {
    let (keeper, away, turn) = begun(Duration::from_secs(600)).await;
    away.refuses.store(5, Ordering::SeqCst);
    turn.finish(result()).await.unwrap();
    assert_eq!(away.refuses.load(Ordering::SeqCst), 0);
    assert_eq!(keeper.once("k").result().await.unwrap().unwrap().result, result());
}

#[tokio::test]
async fn a_store_that_stays_away_is_told_and_the_next_one_runs() {
    let (keeper, away, turn) = begun(Duration::from_millis(300)).await;
    let old = turn.fence();
    // Renewals still work, so the lease would last for ever: it is given up after a ttl all the same.
    away.refuses.store(u32::MAX, Ordering::SeqCst);
    let told = turn.finish(result()).await;
    assert!(matches!(told, Err(Error::Unavailable(_))), "{told:?}");
    away.refuses.store(0, Ordering::SeqCst);
    assert_eq!(keeper.once("k").result().await.unwrap(), None);
    let Claim::Turn(next) = keeper.once("k").claim().await.unwrap() else { panic!("nothing was kept") };
    assert!(next.fence() > old);
}

#[tokio::test]
async fn work_that_asks_for_its_own_key_is_told_deadlock() {
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
