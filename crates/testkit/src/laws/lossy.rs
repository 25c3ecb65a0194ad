//! A store behind a network that loses replies, loses requests and delivers requests late, chosen by a seed.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, DeleteOutcome, Error, Expect, Grant, LockName, LockRequest, Page, Record, RecordPage,
    Records, ReleaseOutcome, RenewOutcome, RequestKey, Result, WriteOutcome,
};

use super::*;

/// The seeds that every law runs with; `LOCKKEEPER_SEED` replaces them by one.
pub fn seeds() -> Vec<u64> {
    match std::env::var("LOCKKEEPER_SEED") {
        Ok(seed) => vec![seed.parse().expect("LOCKKEEPER_SEED is a number")],
        Err(_) => (1..=4).collect(),
    }
}

/// A request that changes a record.
enum LateChange {
    Write(LockName, Vec<u8>, Expect, Option<Duration>),
    Delete(LockName, Expect),
}

/// The fate of a request that changes a record, on its way through the network.
#[derive(Clone, Copy)]
enum RequestFate {
    Answered,
    ReplyLost,
    RequestLost,
    /// The store applies the request after a later one.
    DeliveredLate,
}

/// A client of a store whose network is not reliable. Half of the changes are answered; the other half ends as [`Error::Unknown`].
pub struct LossyStore {
    store: Arc<dyn Store>,
    random: AtomicU64,
    late: Mutex<VecDeque<LateChange>>,
    delivered_late: AtomicU64,
    /// Whether requests and releases of locks get lost too.
    loses_locks: bool,
}

impl LossyStore {
    /// Prints the seed, so that a failure can be repeated.
    pub fn new(store: Arc<dyn Store>, seed: u64) -> Arc<Self> {
        if says_seeds() {
            println!("LOCKKEEPER_SEED={seed}");
        }
        let (late, delivered_late) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(LossyStore { store, random: AtomicU64::new(seed), late, delivered_late, loses_locks: false })
    }

    /// The same, and every other request and release of a lock ends as [`Error::Unknown`] too: its reply is lost, or it is. None comes late: a
    /// request that arrives after its release is a new one for the store, unless its connection tells.
    pub fn with_lossy_locks(store: Arc<dyn Store>, seed: u64) -> Arc<Self> {
        let network = Self::new(store, seed);
        Arc::new(LossyStore { loses_locks: true, ..Arc::into_inner(network).expect("it is new") })
    }

    /// How many requests the store got after a later one.
    pub fn delivered_late(&self) -> u64 {
        self.delivered_late.load(Ordering::Relaxed)
    }

    /// SplitMix64: <https://prng.di.unimi.it/splitmix64.c>.
    fn random(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let state = self.random.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn fate(&self) -> RequestFate {
        match self.random() % 6 {
            0 => RequestFate::ReplyLost,
            1 => RequestFate::RequestLost,
            2 => RequestFate::DeliveredLate,
            _ => RequestFate::Answered,
        }
    }

    /// Delivers the requests that are late. The client never sees their answers.
    pub async fn deliver(&self) {
        loop {
            let next = self.late.lock().unwrap().pop_front();
            match next {
                Some(LateChange::Write(key, value, expect, ttl)) => {
                    let _ = self.store.write(&key, &value, expect, ttl).await;
                }
                Some(LateChange::Delete(key, expect)) => drop(self.store.delete(&key, expect).await),
                None => return,
            }
            self.delivered_late.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn pass_lock<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        if !self.loses_locks {
            return request.await;
        }
        match self.random() % 4 {
            0 => request.await.and(Err(Error::Unknown("the reply was lost".into()))),
            1 => Err(Error::Unknown("the request was lost".into())),
            _ => request.await,
        }
    }

    async fn pass<T>(&self, change: LateChange, request: impl Future<Output = Result<T>>) -> Result<T> {
        let fate = self.fate();
        let answer = match fate {
            RequestFate::Answered | RequestFate::ReplyLost => Some(request.await),
            RequestFate::RequestLost => None,
            RequestFate::DeliveredLate => {
                self.late.lock().unwrap().push_back(change);
                return Err(Error::Unknown("no reply yet".into()));
            }
        };
        // An older request arrives behind this one, as often as not.
        if self.random().is_multiple_of(2) {
            self.deliver().await;
        }
        match (fate, answer) {
            (RequestFate::Answered, Some(answer)) => answer,
            _ => Err(Error::Unknown("the reply was lost".into())),
        }
    }
}

crate::forward_locks!(LossyStore, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.pass_lock(self.store.acquire(request)).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.pass_lock(self.store.release(key)).await
    }
});

#[async_trait]
impl Records for LossyStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.store.read(key).await
    }
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let change = LateChange::Write(key.clone(), value.to_vec(), expect, ttl);
        self.pass(change, self.store.write(key, value, expect, ttl)).await
    }
    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.pass(LateChange::Delete(key.clone(), expect), self.store.delete(key, expect)).await
    }
    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.store.scan(prefix, page).await
    }
}
