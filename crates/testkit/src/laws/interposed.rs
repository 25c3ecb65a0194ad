//! A client whose next write meets what others do at that moment.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use lockkeeper_core::{
    AcquireOutcome, Error, Expect, Grant, LockName, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey,
    Result, Store, WriteOutcome,
};

/// The fate of the write that other clients interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It comes after what the others do, and is answered.
    Late,
    /// The store applies it before what the others do, and the client gets the answer after that.
    AnsweredLate,
    /// The store applies it before what the others do, and its reply is lost.
    AppliedUnheard,
    /// It does not reach the store, and the client cannot tell.
    LostUnheard,
}

/// The work of the other clients meanwhile.
type Others = BoxFuture<'static, ()>;

/// One client of a store. The others come between once, at its next write.
pub struct Interposed {
    store: Arc<dyn Store>,
    next: Mutex<Option<(Fate, Others)>>,
    /// How many writes pass before that one.
    writes_before: AtomicU32,
}

impl Interposed {
    /// A client of `store` whose next write has this fate.
    pub fn new(store: Arc<dyn Store>, fate: Fate, others: impl Future<Output = ()> + Send + 'static) -> Self {
        let next = Mutex::new(Some((fate, Box::pin(others) as Others)));
        Interposed { store, next, writes_before: AtomicU32::new(0) }
    }

    /// The same after so many writes that nothing happens to.
    pub fn after(self, writes: u32) -> Self {
        self.writes_before.store(writes, Ordering::Relaxed);
        self
    }
}

crate::forward_locks!(Interposed, {
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

crate::forward_records!(Interposed, {
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let less = |count: u32| count.checked_sub(1);
        if self.writes_before.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return self.store.write(key, value, expect, ttl).await;
        }
        let next = self.next.lock().unwrap().take();
        let Some((fate, others)) = next else { return self.store.write(key, value, expect, ttl).await };
        let applied = match fate {
            Fate::AnsweredLate | Fate::AppliedUnheard => {
                Some(self.store.write(key, value, expect, ttl).await?)
            }
            Fate::Late | Fate::LostUnheard => None,
        };
        others.await;
        match (fate, applied) {
            (Fate::AnsweredLate, Some(outcome)) => Ok(outcome),
            (Fate::Late, _) => self.store.write(key, value, expect, ttl).await,
            _ => Err(Error::Unknown("the reply was lost".into())),
        }
    }
});
