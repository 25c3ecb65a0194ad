//! The store: it owns the connection, the registry and the tasks, and implements the trait `Locks`.

use std::future::Future;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_host::Clock;
use lockkeeper_store_kit::{IoThread, RecentSet, RecordLimits, Task};

use crate::batch::{self, BatchSender};
use crate::catch_up::CatchUp;
use crate::config::Options;
use crate::connection::Connection;
use crate::events::{self, Watchers};
use crate::fence_base::FenceBase;
use crate::hold_back::FirstSeen;
use crate::hold_registry::HoldRegistry;
use crate::keys::{self, Keys};
use crate::profile;
use crate::record_expiry::{self, RecordExpiry};
use crate::{sweep, unknown};

/// Locks and records in ZooKeeper. Clones share one session and one thread.
#[derive(Clone)]
pub struct ZooKeeperStore {
    pub(crate) shared: Arc<StoreInner>,
    // The last field, so that it is dropped last: it ends the thread and all tasks on it.
    io_thread: Arc<(IoThread, [Task<()>; 5])>,
}

/// The state that the store shares with the tasks on its thread.
pub(crate) struct StoreInner {
    pub options: Options,
    pub clock: Arc<dyn Clock>,
    pub keys: Keys,
    pub connection: Connection,
    pub batch: BatchSender,
    pub catch_up: CatchUp,
    pub registry: HoldRegistry,
    pub watchers: Watchers,
    pub limits: RecordLimits,
    pub record_expiry: RecordExpiry,
    pub first_seen: FirstSeen,
    /// The number that is added to a zxid to make a fence.
    pub base: Mutex<FenceBase>,
    /// The highest fence that this process has seen.
    pub highest_fence_seen: AtomicU64,
    /// The names whose queue nodes existed at their last use.
    pub known_queues: RecentSet<LockName>,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for ZooKeeperStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ZooKeeperStore({:?})", self.shared.options.servers)
    }
}

impl ZooKeeperStore {
    /// Connects, checks the servers, and refuses those that cannot work.
    ///
    /// # Errors
    /// [`Error::Unavailable`] or [`Error::Unknown`] if no server replies, [`Error::Denied`] if the password is wrong
    /// or a right is missing, [`Error::Invalid`] if the path of the address does not exist, [`Error::Unsupported`] if
    /// the servers are too old, or the path has nodes in another format.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io_thread = IoThread::start("lockkeeper-zookeeper")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let (batch, batch_queue) = batch::channel();
        let shared = Arc::new(StoreInner {
            clock: options.clock.clone(),
            keys: Keys::new(&options.base),
            connection: Connection::new(&options),
            batch,
            catch_up: CatchUp::default(),
            options,
            registry: HoldRegistry::default(),
            watchers: Watchers::default(),
            limits: RecordLimits::default(),
            record_expiry: RecordExpiry::default(),
            first_seen: FirstSeen::default(),
            base: Mutex::default(),
            highest_fence_seen: AtomicU64::new(0),
            known_queues: RecentSet::default(),
            profile: OnceLock::new(),
        });
        let tasks = [
            io_thread.spawn(unknown::run(shared.clone())),
            io_thread.spawn(events::run(shared.clone())),
            io_thread.spawn(record_expiry::run(shared.clone())),
            io_thread.spawn(sweep::run(shared.clone())),
            io_thread.spawn(batch::run(batch_queue)),
        ];
        let store = ZooKeeperStore { shared, io_thread: Arc::new((io_thread, tasks)) };
        let profile = store.run(profile::check(&store.shared)).await?;
        _ = store.shared.profile.set(profile);
        Ok(store)
    }

    /// Runs a future with the sockets and timers of the store's own thread. Dropping the returned future cancels it.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.io_thread.0.lend(work).await
    }
}

#[async_trait]
impl Locks for ZooKeeperStore {
    fn profile(&self) -> Profile {
        self.shared.profile.get().expect("set when it was opened").clone()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        self.run(self.shared.acquire(request)).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.run(self.shared.renew(grants)).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let hash = keys::hash_attempt(&key.attempt);
        Ok(self.run(self.shared.release_attempt(&key.names, hash)).await?)
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.run(self.shared.inspect_lock(name)).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.run(self.shared.list_locks(prefix, page)).await
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
