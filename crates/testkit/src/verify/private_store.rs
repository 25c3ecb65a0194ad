//! A store of the user of which only the names below one prefix are visible, and whose locks and records end soon.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{
    AcquireOutcome, Attempt, Busy, DeleteOutcome, Error, Event, EventStream, Expect, Fence, Grant,
    IgnorePoison, Limits, LockName, LockPage, LockRequest, LockView, Locks, Names, Page, Profile, Record,
    RecordPage, Records, ReleaseOutcome, RenewOutcome, RequestKey, Result, Store, WriteOutcome,
};

/// The longest ttl, lock-delay, min-hold and life of a record: what a verification leaves behind when it is killed ends within it.
pub const LONGEST: Duration = Duration::from_secs(50);

/// The requests of one law, and the errors that it got.
#[derive(Default)]
pub(super) struct StoreLog {
    grants: AtomicU64,
    failure: Mutex<Option<String>>,
    /// The requests that the law has not released.
    open: Mutex<HashMap<Attempt, OpenRequest>>,
}

/// A request, and the client that sent it.
type OpenRequest = (Arc<dyn Store>, RequestKey);

impl StoreLog {
    /// How many grants the law got.
    pub fn grants(&self) -> u64 {
        self.grants.load(Ordering::Relaxed)
    }

    /// The first error that is the fault of the store or of the network, and no answer.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().ignore_poison().clone()
    }

    /// Releases what the law has left: a law may end while its requests wait.
    pub async fn release_all(&self) {
        let open: Vec<_> = self.open.lock().ignore_poison().drain().map(|(_, request)| request).collect();
        for (store, key) in open {
            // A lock that cannot be released ends with its ttl.
            _ = store.release(&key).await;
        }
    }

    fn note(&self, error: &Error) {
        // Every store has a limit for the size of a record, and a law tries it.
        let size = matches!(error, Error::Limited(text) if text.starts_with("a record may have"));
        let failed = match error {
            Error::Unavailable(_) | Error::Unknown(_) | Error::Denied(_) | Error::Limited(_) => !size,
            _ => false,
        };
        if failed {
            self.failure.lock().ignore_poison().get_or_insert(error.to_string());
        }
    }
}

/// One client of the user's store: every name gets the prefix on its way in and loses it on its way out.
#[derive(Clone)]
pub(super) struct PrivateStore {
    store: Arc<dyn Store>,
    prefix: Arc<str>,
    log: Arc<StoreLog>,
}

impl PrivateStore {
    /// The names of `store` below `prefix`, which ends with a slash.
    pub fn new(store: Arc<dyn Store>, prefix: Arc<str>, log: Arc<StoreLog>) -> Self {
        PrivateStore { store, prefix, log }
    }

    fn inner(&self, name: &LockName) -> Result<LockName> {
        LockName::new(format!("{}{name}", self.prefix))
    }

    fn outer(&self, name: &LockName) -> Result<LockName> {
        let rest = name.as_str().strip_prefix(&*self.prefix);
        LockName::new(rest.ok_or_else(|| Error::invalid(format!("{name} is not below {}", self.prefix)))?)
    }

    fn key(&self, key: &RequestKey) -> Result<RequestKey> {
        let names: Result<Vec<LockName>> = key.names.iter().map(|name| self.inner(name)).collect();
        Ok(RequestKey { attempt: key.attempt, names: Names::new(names?)? })
    }

    fn page(&self, page: &Page) -> Result<Page> {
        let after = page.after.as_ref().map(|name| self.inner(name)).transpose()?;
        Ok(Page { after, limit: page.limit })
    }

    fn view(&self, view: LockView) -> Result<LockView> {
        Ok(LockView { name: self.outer(&view.name)?, ..view })
    }

    fn record(&self, record: Record) -> Result<Record> {
        Ok(Record { key: self.outer(&record.key)?, ..record })
    }

    fn request(&self, request: &LockRequest) -> Result<LockRequest> {
        let mut inner = LockRequest { key: self.key(&request.key)?, ..request.clone() };
        // A request that no store takes is passed on as it is.
        if request.check().is_ok() {
            inner.ttl = shortened(request.ttl);
            inner.lock_delay = request.lock_delay.min(LONGEST);
            inner.min_hold = request.min_hold.min(LONGEST);
        }
        Ok(inner)
    }

    /// The result as the law sees it, after a failure of the store has been noted.
    fn noted<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            self.log.note(&error);
            match error {
                Error::Deadlock(names) => {
                    let outer: Result<Vec<_>> = names.iter().map(|name| self.outer(name)).collect();
                    outer.map_or(Error::Deadlock(names), Error::Deadlock)
                }
                error => error,
            }
        })
    }
}

/// The longest ttl keeps the fraction of a second of the one that was asked for: laws test fractions.
fn shortened(ttl: Duration) -> Duration {
    if ttl <= LONGEST { ttl } else { LONGEST + Duration::from_nanos(ttl.subsec_nanos().into()) }
}

#[async_trait]
impl Locks for PrivateStore {
    fn profile(&self) -> Profile {
        self.store.profile()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let inner = self.request(request)?;
        let open = (self.store.clone(), inner.key.clone());
        self.log.open.lock().ignore_poison().insert(inner.key.attempt, open);
        let outcome = self.noted(self.store.acquire(&inner).await)?;
        Ok(match outcome {
            AcquireOutcome::Granted(grant) => {
                self.log.grants.fetch_add(1, Ordering::Relaxed);
                // The guard renews as soon as the shorter lease demands.
                let key = request.key.clone();
                AcquireOutcome::Granted(Grant { key, ttl: request.ttl, ..grant })
            }
            AcquireOutcome::Busy(busy) => {
                self.log.open.lock().ignore_poison().remove(&inner.key.attempt);
                AcquireOutcome::Busy(Busy { name: self.outer(&busy.name)?, ..busy })
            }
        })
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let inner = |grant: &Grant| {
            Ok(Grant { key: self.key(&grant.key)?, ttl: shortened(grant.ttl), ..grant.clone() })
        };
        let inner: Result<Vec<Grant>> = grants.iter().map(inner).collect();
        self.noted(self.store.renew(&inner?).await)
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let released = self.noted(self.store.release(&self.key(key)?).await)?;
        self.log.open.lock().ignore_poison().remove(&key.attempt);
        Ok(released)
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let view = self.noted(self.store.inspect(&self.inner(name)?).await)?;
        view.map(|view| self.view(view)).transpose()
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let inner = format!("{}{prefix}", self.prefix);
        let found = self.noted(self.store.list(&inner, &self.page(page)?).await)?;
        let locks: Result<Vec<LockView>> = found.locks.into_iter().map(|view| self.view(view)).collect();
        let next = found.next.map(|name| self.outer(&name)).transpose()?;
        Ok(LockPage { locks: locks?, next })
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        let events = self.noted(self.store.watch(&format!("{}{prefix}", self.prefix)).await)?;
        let own = self.clone();
        let events = events.map(move |event| {
            let event = event?;
            Ok(Event { name: own.outer(&event.name)?, ..event })
        });
        Ok(Box::pin(events))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.noted(self.store.revoke(&self.inner(name)?, reason).await)
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.noted(self.store.break_lock(&self.inner(name)?, reason).await)
    }
}

#[async_trait]
impl Records for PrivateStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let found = self.noted(self.store.read(&self.inner(key)?).await)?;
        found.map(|record| self.record(record)).transpose()
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let ttl = Some(ttl.map_or(LONGEST, |ttl| ttl.min(LONGEST)));
        let written = self.noted(self.store.write(&self.inner(key)?, value, expect, ttl).await)?;
        Ok(match written {
            WriteOutcome::Conflict(Some(found)) => WriteOutcome::Conflict(Some(self.record(found)?)),
            other => other,
        })
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        let deleted = self.noted(self.store.delete(&self.inner(key)?, expect).await)?;
        Ok(match deleted {
            DeleteOutcome::Conflict(found) => DeleteOutcome::Conflict(self.record(found)?),
            other => other,
        })
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let inner = format!("{}{prefix}", self.prefix);
        let found = self.noted(self.store.scan(&inner, &self.page(page)?).await)?;
        let records: Result<Vec<Record>> = found.records.into_iter().map(|one| self.record(one)).collect();
        let next = found.next.map(|name| self.outer(&name)).transpose()?;
        Ok(RecordPage { records: records?, next })
    }
}

/// No law of the locks takes tokens, and a bucket would outlive the verification.
#[async_trait]
impl Limits for PrivateStore {
    async fn limit(&self, _request: &LimitRequest) -> Result<LimitOutcome> {
        Err(self.store.profile().lacks("rate limits in a verification"))
    }
}

crate::forward_examine!(PrivateStore);
