//! The store that a program opens, and the state that its tasks share.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_store_kit::{IoThread, RecentSet, RecordLimits, Task, hash_attempt};

use crate::acquire::Acquirer;
use crate::batch::{self, BatchRunner};
use crate::break_lock::LockBreaker;
use crate::client::EtcdClient;
use crate::config::Options;
use crate::connection::Connection;
use crate::events::Watchers;
use crate::fence_base::FenceBase;
use crate::hold_registry::EtcdHolds;
use crate::inspect::Inspector;
use crate::key_slots::SlotPool;
use crate::keys::Keys;
use crate::lease_pool::{self, LeasePool};
use crate::profile;
use crate::record_store::RecordStore;
use crate::release::Releaser;
use crate::renew::Renewer;
use crate::unknown::HoldEnder;
use crate::watcher;

/// Locks and records in etcd. Clones share everything.
#[derive(Clone)]
pub struct EtcdStore {
    pub(crate) shared: Arc<EtcdShared>,
    // The last field: dropping it ends the thread and every task on it.
    io_thread: Arc<(IoThread, [Task<()>; 5])>,
}

/// The parts of a store, one for each concern. Each has the others that it needs.
pub(crate) struct EtcdShared {
    options: Options,
    pub client: Arc<EtcdClient>,
    base: Arc<FenceBase>,
    acquirer: Acquirer,
    renewer: Renewer,
    releaser: Arc<Releaser>,
    breaker: LockBreaker,
    inspector: Inspector,
    watchers: Arc<Watchers>,
    records: RecordStore,
    limits: RecordLimits,
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
        let (keys, clock) = (Keys::new(&options.prefix), options.clock.clone());
        let connection = Arc::new(Connection::new(&options)?);
        let (batch, queued_txns) = batch::channel();
        let batch_runner =
            BatchRunner { keys: keys.clone(), clock: clock.clone(), connection: connection.clone() };
        let client = Arc::new(EtcdClient { keys, clock, connection: connection.clone(), batch });
        let base = Arc::new(FenceBase::new(client.clone()));
        let registry = Arc::<EtcdHolds>::default();
        let (leases, keep_alives) = LeasePool::new(&options, connection.clone(), registry.clone());
        let leases = Arc::new(leases);
        let (key_watcher, watch_commands) = watcher::channel();
        let key_watcher = Arc::new(key_watcher);
        let releaser =
            Arc::new(Releaser { client: client.clone(), base: base.clone(), registry: registry.clone() });
        let hold_ender = HoldEnder {
            client: client.clone(),
            registry: registry.clone(),
            leases: leases.clone(),
            releaser: releaser.clone(),
        };
        let watchers = Arc::new(Watchers::new(client.clone(), base.clone(), key_watcher.clone()));
        let tasks = [
            io_thread.spawn(batch_runner.run(queued_txns)),
            io_thread.spawn(lease_pool::run(leases.clone(), keep_alives)),
            io_thread.spawn(watcher::run(connection, watch_commands)),
            io_thread.spawn(Arc::new(hold_ender).run()),
            io_thread.spawn(watchers.clone().run()),
        ];
        let shared = Arc::new(EtcdShared {
            acquirer: Acquirer {
                client: client.clone(),
                base: base.clone(),
                registry: registry.clone(),
                leases: leases.clone(),
                releaser: releaser.clone(),
                key_watcher,
                slots: SlotPool::default(),
                recently_contended: RecentSet::default(),
                poll: options.poll,
            },
            renewer: Renewer { client: client.clone(), registry, leases, releaser: releaser.clone() },
            releaser,
            breaker: LockBreaker { client: client.clone(), base: base.clone() },
            inspector: Inspector { client: client.clone(), base: base.clone() },
            watchers,
            records: RecordStore { client: client.clone(), base: base.clone() },
            limits: RecordLimits::default(),
            profile: OnceLock::new(),
            options,
            client,
            base,
        });
        let store = EtcdStore { shared, io_thread: Arc::new((io_thread, tasks)) };
        store.find_profile().await?;
        Ok(store)
    }

    /// Checks the servers, one after the other until one replies.
    async fn find_profile(&self) -> Result<()> {
        // Opening sends nothing that must not be repeated, so a silent or partitioned member only costs a try.
        let EtcdShared { options, client, base, profile, .. } = &*self.shared;
        for left in (0..options.servers.len()).rev() {
            match self.run(profile::profile(options, &client.connection, base)).await {
                Err(error @ (Error::Unknown(_) | Error::Unavailable(_))) if left > 0 => {
                    tracing::debug!(%error, "opening failed at this member; trying the next one");
                }
                found => {
                    _ = profile.set(found?);
                    break;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn options(&self) -> &Options {
        &self.shared.options
    }

    /// Runs a future with the sockets and timers of the store's own thread. Dropping it cancels the work.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.io_thread.0.lend(work).await
    }
}

// Rate limits compare and swap records, because etcd has no clock that a transaction can read. The wall clock of the client
// decides, and never goes back in a stored bucket.
lockkeeper_store_kit::lent_records!(EtcdStore, |store|
    records: store.shared.records, limits: store.shared.limits, clock: store.shared.client.clock, wall: store.shared.client.clock.wall());

#[async_trait]
impl Locks for EtcdStore {
    fn profile(&self) -> Profile {
        let profile = self.shared.profile.get().expect("open() has set it").clone();
        let shortest =
            Duration::from_secs(self.shared.client.connection.shortest_lease.load(Ordering::Relaxed));
        // The queue entry of a dead process stays at least for the shortest lease of this etcd.
        let wake = profile.wake.max(self.shared.options.poll + shortest);
        Profile { wake, ..profile }
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        self.run(self.shared.acquirer.acquire(request)).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.run(self.shared.renewer.renew(grants)).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let attempt = hash_attempt(&key.attempt);
        Ok(self.run(self.shared.releaser.release_attempt(&key.names, attempt)).await?)
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
