//! The store that a program opens, and the state that its tasks share.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_host::Clock;
use lockkeeper_store_kit::{IoThread, RecentSet, RecordLimits, Task};

use crate::batch::{self, BatchSender};
use crate::config::Options;
use crate::connection::Connection;
use crate::events::{self, Watchers};
use crate::hold_registry::HoldRegistry;
use crate::key_slots::SlotPool;
use crate::keys::{self, Keys};
use crate::lease::{self, EtcdLease, LeasePool};
use crate::profile;
use crate::unknown;
use crate::watcher::{self, KeyWatcher};

/// Locks and records in etcd. Clones share everything.
#[derive(Clone)]
pub struct EtcdStore {
    pub(crate) shared: Arc<EtcdShared>,
    // The last field: dropping it ends the thread and every task on it.
    io_thread: Arc<(IoThread, [Task<()>; 5])>,
}

/// The state that the store and the tasks on its thread share.
pub(crate) struct EtcdShared {
    pub options: Options,
    pub clock: Arc<dyn Clock>,
    pub keys: Keys,
    pub connection: Connection,
    pub batch: BatchSender,
    pub leases: LeasePool,
    /// The leases of queue entries, one for each length.
    pub queue_leases: Mutex<Vec<Arc<EtcdLease>>>,
    pub key_watcher: KeyWatcher,
    pub registry: HoldRegistry,
    pub slots: SlotPool,
    /// Names that were contended a short time ago. A request for one of them enqueues in its first transaction, which
    /// costs etcd twice as much as the plain attempt that all other requests make.
    pub recently_contended: RecentSet<LockName>,
    pub watchers: Watchers,
    pub limits: RecordLimits,
    /// The fence base.
    pub base: AtomicU64,
    /// The highest fence that this process has seen.
    pub highest_fence_seen: AtomicU64,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EtcdStore({:?})", self.shared.options.servers)
    }
}

impl EtcdStore {
    /// Connects, reads the server's version, and rejects a server that cannot work.
    ///
    /// # Errors
    /// [`Error::Unavailable`] or [`Error::Unknown`] if no member replies, [`Error::Denied`] if the password is wrong or a
    /// permission is missing, [`Error::Unsupported`] if the server is too old.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io_thread = IoThread::start("lockkeeper-etcd")
            .map_err(|error| Error::Unavailable(format!("cannot start the I/O thread: {error}")))?;
        let (batch, receiver) = batch::channel();
        let (leases, keep_alives) = lease::pool();
        let (key_watcher, commands) = watcher::channel();
        let shared = Arc::new(EtcdShared {
            clock: options.clock.clone(),
            keys: Keys::new(&options.prefix),
            connection: Connection::new(&options)?,
            options,
            batch,
            leases,
            queue_leases: Mutex::default(),
            key_watcher,
            registry: HoldRegistry::default(),
            slots: SlotPool::default(),
            recently_contended: RecentSet::default(),
            watchers: Watchers::default(),
            limits: RecordLimits::default(),
            base: AtomicU64::new(0),
            highest_fence_seen: AtomicU64::new(0),
            profile: OnceLock::new(),
        });
        let tasks = [
            io_thread.spawn(batch::run(shared.clone(), receiver)),
            io_thread.spawn(lease::run(shared.clone(), keep_alives)),
            io_thread.spawn(watcher::run(shared.clone(), commands)),
            io_thread.spawn(unknown::run(shared.clone())),
            io_thread.spawn(events::run(shared.clone())),
        ];
        let store = EtcdStore { shared, io_thread: Arc::new((io_thread, tasks)) };
        // Opening sends nothing that must not be repeated, so a silent or partitioned member only costs a try.
        for left in (0..store.shared.options.servers.len()).rev() {
            match store.run(profile::profile(&store.shared)).await {
                Err(error @ (Error::Unknown(_) | Error::Unavailable(_))) if left > 0 => {
                    tracing::debug!(%error, "opening failed at this member; trying the next one");
                }
                profile => {
                    _ = store.shared.profile.set(profile?);
                    break;
                }
            }
        }
        Ok(store)
    }

    /// Runs a future with the sockets and timers of the store's own thread. Dropping it cancels the work.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.io_thread.0.lend(work).await
    }
}

#[async_trait]
impl Locks for EtcdStore {
    fn profile(&self) -> Profile {
        let profile = self.shared.profile.get().expect("open() has set it").clone();
        let shortest = Duration::from_secs(self.shared.connection.shortest_lease.load(Ordering::Relaxed));
        // The queue entry of a dead process stays at least for the shortest lease of this etcd.
        let wake = profile.wake.max(self.shared.options.poll + shortest);
        Profile { wake, ..profile }
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        self.run(self.shared.acquire(request)).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.run(self.shared.renew(grants)).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let attempt = keys::hash_attempt(&key.attempt);
        Ok(self.run(self.shared.release_attempt(&key.names, attempt)).await?)
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.run(self.shared.inspect(name)).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.run(self.shared.list(prefix, page)).await
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.run(self.shared.watch(prefix)).await
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.shared.revoke(name, reason)).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.shared.break_lock(name, reason)).await
    }
}
