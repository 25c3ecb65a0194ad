//! A store that one client cannot reach for a while, from the write that says *done* on, or from the first part of a large result on.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use lockkeeper::Clock;
use lockkeeper_core::{
    AcquireOutcome, BootInstant, Error, Expect, Grant, LockName, LockRequest, ReleaseOutcome, RenewOutcome,
    RequestKey, Result, Store, WriteOutcome,
};

/// Longer than a dozen quick retries, shorter than [`super::outage::TTL`].
const LASTS: Duration = Duration::from_secs(4);
/// A lease that outlasts the outage without a renewal.
pub const TTL: Duration = Duration::from_secs(30);

/// The fate of the write that begins the outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstLoss {
    /// The store applies it, and its reply is lost.
    Applied,
    /// It does not reach the store.
    NotSent,
}

/// The write that begins the outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutageStart {
    /// The one that says *done*.
    Done,
    /// The first part of a large result.
    Part,
}

/// One client whose connection fails in one write, and for some seconds after it.
pub struct OutageStore {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    start: OutageStart,
    first: FirstLoss,
    state: Mutex<OutageState>,
}

#[derive(Default)]
struct OutageState {
    began: Option<BootInstant>,
    refused: usize,
}

impl OutageStore {
    /// A client of `store` before its outage.
    pub fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>, start: OutageStart, first: FirstLoss) -> Self {
        OutageStore { store, clock, start, first, state: Mutex::default() }
    }

    /// The number of calls that the outage has refused.
    pub fn refused(&self) -> usize {
        self.state.lock().unwrap().refused
    }

    /// The error of a call during the outage. Each kind that may pass has its turn.
    fn error(&self) -> Option<Error> {
        let mut state = self.state.lock().unwrap();
        if self.clock.now().since(state.began?) >= LASTS {
            return None;
        }
        state.refused += 1;
        Some(match state.refused % 4 {
            0 => Error::Limited("an outage".into()),
            1 => Error::Unknown("an outage".into()),
            _ => Error::Unavailable("an outage".into()),
        })
    }

    /// Whether this write begins the outage.
    fn begins(&self, key: &LockName, value: &[u8]) -> bool {
        let says = |text: &[u8]| value.windows(text.len()).any(|part| part == text);
        let is_start = match self.start {
            OutageStart::Done => says(b"\"done\":{") || says(b"\"done\":true"),
            OutageStart::Part => key.as_str().starts_with("once-part/"),
        };
        let mut state = self.state.lock().unwrap();
        let begins = state.began.is_none() && is_start;
        if begins {
            state.began = Some(self.clock.now());
        }
        begins
    }

    fn check(&self) -> Result<()> {
        self.error().map_or(Ok(()), Err)
    }
}

crate::forward_locks!(OutageStore, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.check()?;
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.check()?;
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.check()?;
        self.store.release(key).await
    }
});

crate::forward_records!(OutageStore, {
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        if self.begins(key, value) {
            if self.first == FirstLoss::Applied {
                self.store.write(key, value, expect, ttl).await?;
            }
            return Err(Error::Unknown("an outage".into()));
        }
        self.check()?;
        self.store.write(key, value, expect, ttl).await
    }
});
