//! The store: exclusive locks that the processes of one host share through a directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{
    AcquireOutcome, ClockReading, EventStream, Examination, Examine, Fence, Grant, Limits, LockName,
    LockPage, LockRequest, LockView, Locks, Page, Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result,
    limits,
};
use lockkeeper_host::{Clock, boot_id};
use lockkeeper_store_kit::{PendingRequests, no_records};

use crate::codec::StoredLock;
use crate::profile::profile;
use crate::statements::LockedFiles;

/// Locks as files. A step takes microseconds and awaits nothing while it has the flock, so it runs on the caller's thread; a step on
/// another thread would go on after its caller was cancelled, and could grant what the caller has released already.
pub struct DirectoryStore {
    pub(crate) dir: PathBuf,
    pub(crate) boot: Option<String>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) pending: PendingRequests,
}

impl DirectoryStore {
    pub fn open(dir: &Path, clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        Ok(DirectoryStore { dir: dir.canonicalize()?, boot: boot_id()?, clock, pending: Default::default() })
    }

    pub(crate) fn files(&self) -> Result<LockedFiles<'_>> {
        LockedFiles::open(&self.dir, &self.boot)
    }
}

no_records!(DirectoryStore, profile().lacks("records"));

#[async_trait]
impl Limits for DirectoryStore {
    async fn limit(&self, _: &LimitRequest) -> Result<LimitOutcome> {
        Err(profile().lacks("rate limits"))
    }
}

#[async_trait]
impl Examine for DirectoryStore {
    async fn examine(&self) -> Result<Examination> {
        Ok(Examination::default())
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        Ok(Vec::new())
    }
}

#[async_trait]
impl Locks for DirectoryStore {
    fn profile(&self) -> Profile {
        profile()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        profile().check_features(request)?;
        self.poll(request).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let (files, now) = (self.files()?, self.clock.now());
        let renew = |grant: &Grant| -> Result<RenewOutcome> {
            let held = files.read(grant.key.names.first(), now)?;
            match held.filter(|lock| lock.belongs_to(&grant.key.attempt)) {
                Some(lock) => {
                    files.write(&StoredLock { expires_ns: (now + grant.ttl).as_nanos(), ..lock })?
                }
                None => return Ok(RenewOutcome::Lost),
            }
            Ok(RenewOutcome::Renewed)
        };
        // One damaged file must not cost the other holders their leases.
        Ok(grants.iter().map(|grant| renew(grant).unwrap_or(RenewOutcome::Unknown)).collect())
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let files = self.files()?;
        let withdrawn = self.pending.cancel(key.attempt);
        let held = files.read(key.names.first(), self.clock.now())?;
        let own = held.filter(|lock| lock.belongs_to(&key.attempt));
        if let Some(lock) = &own {
            files.remove(&lock.name)?;
        }
        Ok(if withdrawn || own.is_some() { ReleaseOutcome::Released } else { ReleaseOutcome::AlreadyGone })
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let (files, now) = (self.files()?, self.clock.now());
        Ok(files.read(name, now)?.map(|lock| lock.view(now)))
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let (files, now) = (self.files()?, self.clock.now());
        let locks = files.read_all(now)?.iter().map(|lock| lock.view(now)).collect();
        Ok(LockPage::select(locks, prefix, page))
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        Err(profile().lacks("watches"))
    }

    async fn revoke(&self, _name: &LockName, _reason: &str) -> Result<Fence> {
        Err(profile().lacks("revoke"))
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        let files = self.files()?;
        let fence = files.next_fence(self.clock.wall())?;
        files.remove(name)?;
        Ok(fence)
    }
}
