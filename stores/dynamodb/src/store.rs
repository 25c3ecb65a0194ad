//! The store: what its clones share, and the trait `Locks`.

use std::future::Future;
use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_store_kit::{IoThread, PendingRequests, RecordLimits};

use crate::acquire::Acquirer;
use crate::break_lock::LockBreaker;
use crate::cas::LockTable;
use crate::config::Options;
use crate::own_leases::OwnLeases;
use crate::record_store::RecordStore;
use crate::release::Releaser;
use crate::renew::Renewer;
use crate::server_clock::DynamoClock;
use crate::statements::TableClient;
use crate::{connection, profile};

/// Locks and records in DynamoDB. Clones share everything.
#[derive(Clone)]
pub struct DynamoStore {
    pub(crate) inner: Arc<DynamoInner>,
    // The last field: dropping the thread ends every task that runs on it.
    io_thread: Arc<IoThread>,
}

/// The parts of a store, one for each concern. Each has the others that it needs.
pub(crate) struct DynamoInner {
    pub options: Options,
    pub table: TableClient,
    locks: Arc<LockTable>,
    acquirer: Acquirer,
    renewer: Renewer,
    releaser: Arc<Releaser>,
    breaker: LockBreaker,
    pub records: RecordStore,
    pub limits: RecordLimits,
    profile: Profile,
}

impl std::fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DynamoStore({}, {:?})", self.inner.options.region, self.inner.options.table)
    }
}

impl DynamoStore {
    /// Finds credentials, checks the table, and refuses a table that cannot keep locks.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if DynamoDB does not answer, [`Error::Denied`] if the credentials are missing or refused,
    /// [`Error::Invalid`] if the table is missing or has another key, [`Error::Limited`] if DynamoDB throttles.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io_thread = IoThread::start("lockkeeper-dynamodb")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let clock = DynamoClock::new(options.clock.clone());
        let (client, profile) = io_thread
            .lend(async {
                let client = connection::connect(&options, &clock).await;
                let profile = profile::profile(&client, &options).await?;
                Ok::<_, Error>((client, profile))
            })
            .await?;
        let locks = Arc::new(LockTable::new(options.clone(), client.clone(), clock.clone()));
        let own_leases = Arc::new(OwnLeases::default());
        let pending = Arc::new(PendingRequests::default());
        let releaser = Arc::new(Releaser {
            locks: locks.clone(),
            own_leases: own_leases.clone(),
            pending: pending.clone(),
        });
        let inner = DynamoInner {
            acquirer: Acquirer {
                options: options.clone(),
                locks: locks.clone(),
                own_leases: own_leases.clone(),
                pending,
                releaser: releaser.clone(),
            },
            renewer: Renewer { clock: options.clock.clone(), locks: locks.clone(), own_leases },
            releaser,
            breaker: LockBreaker { locks: locks.clone() },
            locks,
            records: RecordStore::new(options.clone(), client.clone(), clock),
            table: client,
            limits: RecordLimits::default(),
            options,
            profile,
        };
        Ok(DynamoStore { inner: Arc::new(inner), io_thread: Arc::new(io_thread) })
    }

    /// Runs a future with the sockets and timers of the store's own thread. Dropping the future cancels the work.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.io_thread.lend(work).await
    }
}

#[async_trait]
impl Locks for DynamoStore {
    fn profile(&self) -> Profile {
        self.inner.profile.clone()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        self.run(self.inner.acquirer.acquire(request)).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.run(self.inner.renewer.renew(grants)).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.run(self.inner.releaser.release(key)).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.run(self.inner.locks.inspect(name)).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.run(self.inner.locks.list(prefix, page)).await
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        Err(Error::Unsupported(
            "the dynamodb store has no events to watch: inspect the lock repeatedly, or use another store"
                .into(),
        ))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.inner.breaker.revoke(name, reason)).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.run(self.inner.breaker.break_lock(name, reason)).await
    }
}
