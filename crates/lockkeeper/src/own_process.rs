//! A store that answers only the process that opened it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{
    AcquireOutcome, ClockReading, DeleteOutcome, Error, EventStream, Examination, Examine, Expect, Fence,
    Grant, Limits, LockName, LockPage, LockRequest, LockView, Locks, Page, Profile, Record, RecordPage,
    Records, ReleaseOutcome, RenewOutcome, RequestKey, Result, Store, WriteOutcome,
};

/// A fork copies the memory of a store, but neither its threads nor its connections: in the child a call
/// would wait without an end, or write to a socket that the parent uses too. So a call in the child is
/// refused, and the child must open the store itself.
pub(crate) struct OwnProcess {
    store: Arc<dyn Store>,
    pid: u32,
}

impl OwnProcess {
    pub fn new(store: Arc<dyn Store>) -> Self {
        OwnProcess { store, pid: std::process::id() }
    }

    fn store(&self) -> Result<&Arc<dyn Store>> {
        check(self.pid).map(|()| &self.store)
    }
}

/// Whether this is the process `pid`.
pub(crate) fn check(pid: u32) -> Result<()> {
    if pid == std::process::id() {
        return Ok(());
    }
    Err(Error::Unavailable(format!(
        "the store was opened by process {pid}, of which this one is a fork: open it anew here"
    )))
}

#[async_trait]
impl Locks for OwnProcess {
    fn profile(&self) -> Profile {
        self.store.profile()
    }
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store()?.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store()?.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store()?.release(key).await
    }
    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.store()?.inspect(name).await
    }
    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.store()?.list(prefix, page).await
    }
    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.store()?.watch(prefix).await
    }
    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.store()?.revoke(name, reason).await
    }
    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.store()?.break_lock(name, reason).await
    }
}

#[async_trait]
impl Records for OwnProcess {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.store()?.read(key).await
    }
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        self.store()?.write(key, value, expect, ttl).await
    }
    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.store()?.delete(key, expect).await
    }
    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.store()?.scan(prefix, page).await
    }
}

#[async_trait]
impl Limits for OwnProcess {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        self.store()?.limit(request).await
    }
}

#[async_trait]
impl Examine for OwnProcess {
    async fn examine(&self) -> Result<Examination> {
        self.store()?.examine().await
    }
    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        self.store()?.read_clocks().await
    }
}
