//! The store that a program opens, and the parts that its tasks share.

use std::future::Future;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_store_kit::{IoThread, RecentSet, RecordLimits, Task, hash_attempt};
use tokio::sync::Notify;

use crate::acquire::Acquirer;
use crate::batch::{self, BatchQueue};
use crate::break_lock::LockBreaker;
use crate::catch_up::CatchUp;
use crate::client::ZooKeeperClient;
use crate::config::Options;
use crate::event_log::EventLog;
use crate::events::Watchers;
use crate::fence_base::FenceBase;
use crate::hold_back::HoldBacks;
use crate::hold_registry::ZooKeeperHolds;
use crate::inspect::Inspector;
use crate::profile;
use crate::read_queue::QueueReader;
use crate::record_chunks::ChunkStore;
use crate::record_expiry::RecordExpiry;
use crate::record_store::RecordStore;
use crate::release::Releaser;
use crate::renew::Renewer;
use crate::request_barrier::RequestBarriers;
use crate::sweep::{self, Sweeper};
use crate::unknown::HoldEnder;

/// Locks and records in ZooKeeper. Clones share one session and one thread.
#[derive(Clone)]
pub struct ZooKeeperStore {
    pub(crate) shared: Arc<ZooKeeperShared>,
    // The last field, so that it is dropped last: it ends the thread and all tasks on it.
    io_thread: Arc<(IoThread, [Task<()>; 5])>,
}

/// The parts of a store, one for each concern. Each has the others that it needs.
pub(crate) struct ZooKeeperShared {
    options: Options,
    pub client: Arc<ZooKeeperClient>,
    base: Arc<FenceBase>,
    acquirer: Acquirer,
    renewer: Renewer,
    releaser: Arc<Releaser>,
    breaker: LockBreaker,
    inspector: Inspector,
    watchers: Arc<Watchers>,
    records: Arc<RecordStore>,
    limits: RecordLimits,
    profile: OnceLock<Profile>,
}

/// The tasks of a store that have no other place.
struct BackgroundTasks {
    hold_ender: HoldEnder,
    sweeper: Sweeper,
    batch_queue: BatchQueue,
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
        let (shared, background) = ZooKeeperShared::new(options);
        let overdue = background.sweeper.overdue.clone();
        let tasks = [
            io_thread.spawn(Arc::new(background.hold_ender).run()),
            io_thread.spawn(shared.watchers.clone().run()),
            io_thread.spawn(shared.records.clone().run_expiry()),
            io_thread.spawn(background.sweeper.run()),
            io_thread.spawn(batch::run(background.batch_queue)),
        ];
        let store = ZooKeeperStore { shared: Arc::new(shared), io_thread: Arc::new((io_thread, tasks)) };
        let ZooKeeperShared { options, client, base, profile, .. } = &*store.shared;
        let checked = store.run(profile::check(options, client, base)).await?;
        _ = profile.set(checked);
        match store.run(sweep::is_overdue(client, options.sweep)).await {
            Ok(true) => overdue.notify_one(),
            Ok(false) => {}
            Err(failure) => tracing::debug!(?failure, "cannot find out whether a sweep is overdue"),
        }
        Ok(store)
    }

    pub(crate) fn options(&self) -> &Options {
        &self.shared.options
    }

    /// Runs a future with the sockets and timers of the store's own thread. Dropping the returned future cancels it.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.io_thread.0.lend(work).await
    }
}

impl ZooKeeperShared {
    fn new(options: Options) -> (Self, BackgroundTasks) {
        let (client, batch_queue) = ZooKeeperClient::new(&options);
        let base = Arc::new(FenceBase::new(client.clone()));
        let registry = Arc::<ZooKeeperHolds>::default();
        let catch_up = Arc::new(CatchUp::new(client.keys.bases()));
        let events = Arc::new(EventLog { client: client.clone(), base: base.clone() });
        let hold_backs = Arc::new(HoldBacks::new(client.clone()));
        let queues = Arc::new(QueueReader { client: client.clone(), hold_backs: hold_backs.clone() });
        let barriers = Arc::new(RequestBarriers { client: client.clone() });
        let chunks = Arc::new(ChunkStore { client: client.clone() });
        let watchers = Arc::new(Watchers::new(client.clone(), base.clone(), options.poll));
        let releaser = Arc::new(Releaser {
            client: client.clone(),
            base: base.clone(),
            registry: registry.clone(),
            events: events.clone(),
            hold_backs: hold_backs.clone(),
            queues: queues.clone(),
            barriers: barriers.clone(),
        });
        let records = Arc::new(RecordStore {
            client: client.clone(),
            base: base.clone(),
            catch_up: catch_up.clone(),
            chunks: chunks.clone(),
            expiry: RecordExpiry::default(),
        });
        let hold_ender =
            HoldEnder { client: client.clone(), registry: registry.clone(), releaser: releaser.clone() };
        let sweeper = Sweeper {
            client: client.clone(),
            hold_backs: hold_backs.clone(),
            queues: queues.clone(),
            chunks,
            every: options.sweep,
            overdue: Arc::<Notify>::default(),
        };
        let shared = ZooKeeperShared {
            acquirer: Acquirer {
                client: client.clone(),
                base: base.clone(),
                registry: registry.clone(),
                events: events.clone(),
                queues: queues.clone(),
                barriers,
                releaser: releaser.clone(),
                known_queues: RecentSet::default(),
                poll: options.poll,
                timeout: options.timeout,
            },
            renewer: Renewer { client: client.clone(), registry },
            releaser,
            breaker: LockBreaker {
                client: client.clone(),
                base: base.clone(),
                events,
                hold_backs: hold_backs.clone(),
                queues: queues.clone(),
            },
            inspector: Inspector { client: client.clone(), base: base.clone(), catch_up, hold_backs, queues },
            watchers,
            records,
            limits: RecordLimits::default(),
            profile: OnceLock::new(),
            options,
            client,
            base,
        };
        (shared, BackgroundTasks { hold_ender, sweeper, batch_queue })
    }
}

// Rate limits compare and swap records, because ZooKeeper has no clock that a transaction can read. The wall clock of the
// client decides, and never goes back in a stored bucket.
lockkeeper_store_kit::lent_records!(ZooKeeperStore, |store|
    records: store.shared.records, limits: store.shared.limits, clock: store.shared.client.clock, wall: store.shared.client.clock.wall());

#[async_trait]
impl Locks for ZooKeeperStore {
    fn profile(&self) -> Profile {
        self.shared.profile.get().expect("set when it was opened").clone()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        self.run(self.shared.acquirer.acquire(request)).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.run(self.shared.renewer.renew(grants)).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let hash = hash_attempt(&key.attempt);
        Ok(self.run(self.shared.releaser.release_attempt(&key.names, hash)).await?)
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.run(self.shared.inspector.inspect(name)).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.run(self.shared.inspector.list(prefix, page)).await
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.run(self.shared.watchers.watch(prefix)).await
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.shared.breaker.revoke(name, reason)).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.shared.breaker.break_lock(name, reason)).await
    }
}
