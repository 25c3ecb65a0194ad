//! The store: exclusive locks that the processes of one host share through a directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{
    AcquireOutcome, BootInstant, Busy, DeleteOutcome, Error, EventStream, Expect, Fence, Grant, Guarantee,
    LimitSupport, Limits, LockName, LockPage, LockRequest, LockView, Locks, Mode, Page, Profile, Record,
    RecordPage, Records, ReleaseOutcome, RenewOutcome, RequestKey, Result, WaitOrder, WriteOutcome, limits,
};
use lockkeeper_host::{Clock, boot_id};

use crate::files::{LockedFiles, StoredLock, hash};
use crate::waiting::{PollingCall, PollingRequests};

/// Between two polls of a waiter. In real time, also under a virtual clock: that one stands still while a law waits for a grant.
const POLL: Duration = Duration::from_millis(5);

/// Locks as files. A step takes microseconds and awaits nothing while it has the flock, so it runs on the caller's thread; a step on
/// another thread would go on after its caller was cancelled, and could grant what the caller has released already.
pub struct DirectoryStore {
    dir: PathBuf,
    boot: Option<String>,
    clock: Arc<dyn Clock>,
    polling: PollingRequests,
}

impl DirectoryStore {
    pub fn open(dir: &Path, clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        Ok(DirectoryStore { dir: dir.canonicalize()?, boot: boot_id()?, clock, polling: Default::default() })
    }

    fn files(&self) -> Result<LockedFiles<'_>> {
        LockedFiles::open(&self.dir, &self.boot)
    }

    /// One try: grants the lock, finds the grant that this attempt has already, or names the holder.
    fn try_acquire(&self, request: &LockRequest, call: &PollingCall<'_>) -> Result<AcquireOutcome> {
        let files = self.files()?;
        // Under the flock, as the release does: no grant follows a release.
        if !call.is_wanted() {
            return Err(Error::Unknown("the request was withdrawn, or sent again".into()));
        }
        // After the wait for the flock, or a lease could begin before the one ahead of it has ended.
        let (now, name) = (self.clock.now(), request.key.names.first());
        let (fence, since) = match files.read(name, now)? {
            Some(own) if own.belongs_to(&request.key.attempt) => (own.fence, own.since),
            Some(other) => {
                let busy = Busy { name: name.clone(), held: vec![other.view(now)], waiting: 0 };
                return Ok(AcquireOutcome::Busy(busy));
            }
            None => (files.next_fence(self.clock.wall())?, self.clock.wall()),
        };
        files.write(&StoredLock {
            name: name.clone(),
            attempt_hash: hash(request.key.attempt.as_bytes()),
            fence,
            holder: (*request.holder).clone(),
            since,
            expires_ns: (now + request.ttl).as_nanos(),
            boot: self.boot.clone(),
        })?;
        let (key, ttl) = (request.key.clone(), request.ttl);
        let grant = Grant { key, fence, mode: Mode::Exclusive, ttl, sent_at: now, lease: ttl };
        Ok(AcquireOutcome::Granted(grant))
    }
}

fn unsupported<T>(feature: &str) -> Result<T> {
    Err(Error::Unsupported(format!("the directory store has no {feature}")))
}

/// Refuses what the profile does not declare.
fn check_features(request: &LockRequest) -> Result<()> {
    match request {
        LockRequest { mode: Mode::Shared, .. } => unsupported("shared locks"),
        LockRequest { mode: Mode::Permit(_), .. } => unsupported("permits"),
        LockRequest { owner: Some(_), .. } => unsupported("re-entry"),
        _ if request.key.names.count() > 1 => unsupported("requests for several names"),
        _ if !request.lock_delay.is_zero() => unsupported("lock-delay"),
        _ if !request.min_hold.is_zero() => unsupported("min-hold"),
        _ => Ok(()),
    }
}

#[async_trait]
impl Locks for DirectoryStore {
    fn profile(&self) -> Profile {
        Profile {
            store: "directory".into(),
            exclusion: Guarantee::Kept,
            fence: Guarantee::Likely,
            durable: Guarantee::Likely,
            waiting: WaitOrder::Poll,
            wake: Duration::from_millis(250),
            shared: false,
            permits: false,
            multi_name: false,
            reentry: false,
            deadlocks: false,
            lock_delay: false,
            min_hold: false,
            watch: false,
            revoke: false,
            records: false,
            limits: LimitSupport::No,
            notes: vec!["the store does not sync its files: a power failure can undo the last steps".into()],
        }
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        check_features(request)?;
        let deadline = request.wait.deadline(self.clock.now());
        let call = self.polling.add(request.key.attempt);
        loop {
            let outcome = self.try_acquire(request, &call)?;
            if matches!(outcome, AcquireOutcome::Granted(_)) || self.clock.now() >= deadline {
                return Ok(outcome);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let files = self.files()?;
        let now = self.clock.now();
        let renew = |grant: &Grant| -> Result<RenewOutcome> {
            match files.read(grant.key.names.first(), now)? {
                Some(lock) if lock.belongs_to(&grant.key.attempt) => {
                    files.write(&StoredLock { expires_ns: (now + grant.ttl).as_nanos(), ..lock })?;
                    Ok(RenewOutcome::Renewed)
                }
                _ => Ok(RenewOutcome::Lost),
            }
        };
        // One damaged file must not cost the other holders their leases.
        Ok(grants.iter().map(|grant| renew(grant).unwrap_or(RenewOutcome::Unknown)).collect())
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let files = self.files()?;
        let withdrawn = self.polling.withdraw(&key.attempt);
        let held = files.read(key.names.first(), self.clock.now())?;
        let own = held.filter(|lock| lock.belongs_to(&key.attempt));
        if let Some(lock) = &own {
            files.remove(&lock.name)?;
        }
        Ok(if withdrawn || own.is_some() { ReleaseOutcome::Released } else { ReleaseOutcome::AlreadyGone })
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let (files, now) = (self.files()?, self.clock.now());
        Ok(files.read(name, now)?.map(|lock| view(&lock, now)))
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let (files, now) = (self.files()?, self.clock.now());
        let mut found = files.read_all(now)?;
        found.retain(|lock| lock.name.as_str().starts_with(prefix) && Some(&lock.name) > page.after.as_ref());
        let more = found.len() > page.size();
        found.truncate(page.size());
        let next = found.last().filter(|_| more).map(|last| last.name.clone());
        Ok(LockPage { locks: found.iter().map(|lock| view(lock, now)).collect(), next })
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        unsupported("watches")
    }

    async fn revoke(&self, _name: &LockName, _reason: &str) -> Result<Fence> {
        unsupported("revoke")
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        let files = self.files()?;
        let fence = files.next_fence(self.clock.wall())?;
        files.remove(name)?;
        Ok(fence)
    }
}

fn view(lock: &StoredLock, now: BootInstant) -> LockView {
    let held = vec![lock.view(now)];
    LockView { name: lock.name.clone(), held, queue: Vec::new(), waiting: 0, delayed_ms: None }
}

#[async_trait]
impl Records for DirectoryStore {
    async fn read(&self, _key: &LockName) -> Result<Option<Record>> {
        unsupported("records")
    }

    async fn write(
        &self,
        _key: &LockName,
        _value: &[u8],
        _expect: Expect,
        _ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        unsupported("records")
    }

    async fn delete(&self, _key: &LockName, _expect: Expect) -> Result<DeleteOutcome> {
        unsupported("records")
    }

    async fn scan(&self, _prefix: &str, _page: &Page) -> Result<RecordPage> {
        unsupported("records")
    }
}

#[async_trait]
impl Limits for DirectoryStore {
    async fn limit(&self, _request: &LimitRequest) -> Result<LimitOutcome> {
        unsupported("rate limits")
    }
}
