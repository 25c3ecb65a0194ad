//! The store: it builds the parts, starts their tasks, and implements the lock trait.

use std::sync::{Arc, OnceLock, Weak};

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_host::random_128;
use lockkeeper_store_kit::{IoThread, RecentSet, Task, WaiterTtls};
use tokio::sync::Notify;

use crate::acquire::LockClient;
use crate::batch::{BatchContext, BatchTask, batch};
use crate::codec::hex;
use crate::config::Options;
use crate::connection::{Connection, Role};
use crate::driver::{ListenCallback, ListenEvent};
use crate::events::Watchers;
use crate::listener::NotificationListener;
use crate::unknown::UnknownOutcomes;
use crate::waiters::Waiters;
use crate::{break_lock, events, inspect, poll, profile, renew, sweep};

/// Locks and records in PostgreSQL. Clones share everything.
#[derive(Clone)]
pub struct PostgresStore {
    pub(crate) parts: Arc<StoreParts>,
    // Dropped last: with it end the thread and the tasks that run there.
    _io: Arc<(IoThread, [Task<()>; 5])>,
}

/// The parts of an open store.
pub(crate) struct StoreParts {
    pub options: Arc<Options>,
    pub connection: Arc<Connection>,
    listener: Arc<NotificationListener>,
    locks: LockClient,
    watchers: Arc<Watchers>,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PostgresStore({:?})", self.parts.options)
    }
}

impl PostgresStore {
    /// Connects, creates the schema if it does not exist, checks the server's settings, and refuses a server that cannot keep locks.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the server does not answer or is a standby, [`Error::Denied`] if the password is wrong or a privilege
    /// is missing (with the SQL to run), [`Error::Invalid`] or [`Error::Unsupported`] if the server cannot keep locks.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io = match &options.runtime {
            Some(runtime) => IoThread::on(runtime.clone()),
            None => IoThread::start("lockkeeper-postgres")
                .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?,
        };
        let mut batch_task = None;
        let parts = Arc::new_cyclic(|weak| {
            let (parts, task) = StoreParts::new(Arc::new(options), &io, weak.clone());
            batch_task = Some(task);
            parts
        });
        let batch_task = batch_task.expect("new_cyclic has run its closure");
        let (overdue, unknown) = (Arc::<Notify>::default(), parts.clone());
        let tasks = [
            io.spawn(batch_task.run()),
            io.spawn(poll::run(parts.locks.waiters.clone())),
            io.spawn(async move {
                let locks = &unknown.locks;
                locks.unknown.run(|key| async move { locks.send_release(&key).await.map(|_| ()) }).await;
            }),
            io.spawn(events::run(parts.watchers.clone())),
            io.spawn(sweep::run(parts.connection.clone(), overdue.clone())),
        ];
        let store = PostgresStore { parts: parts.clone(), _io: Arc::new((io, tasks)) };
        let profile = profile::check(&parts.connection, &parts.listener, &parts.options, &overdue).await?;
        _ = parts.profile.set(profile);
        Ok(store)
    }
}

impl StoreParts {
    fn new(options: Arc<Options>, io: &IoThread, weak: Weak<StoreParts>) -> (Self, BatchTask) {
        let callback: ListenCallback = Arc::new(move |event| {
            if let Some(parts) = weak.upgrade() {
                parts.on_listen_event(event);
            }
        });
        let client = hex(&random_128()[..8]);
        let connect = |role| Connection::new(options.clone(), io.handle().clone(), role);
        let connection = Arc::new(connect(Role::Query(client.clone())));
        let listener = connect(Role::Listen(callback));
        let listener = Arc::new(NotificationListener::new(listener, client.clone()));
        let ttls = Arc::<WaiterTtls>::default();
        let (batch, task) = batch(BatchContext {
            options: options.clone(),
            connection: connection.clone(),
            client: client.clone(),
            ttls: ttls.clone(),
        });
        let batch = Arc::new(batch);
        let waiters = Arc::new(Waiters {
            options: options.clone(),
            connection: connection.clone(),
            listener: listener.clone(),
            batch: batch.clone(),
            ttls,
            client,
            state: Default::default(),
            changed: Notify::new(),
            must_listen: Notify::new(),
        });
        let locks = LockClient {
            options: options.clone(),
            batch,
            waiters,
            unknown: UnknownOutcomes::new(options.timeout),
            recently_contended: RecentSet::default(),
            fast_path_grants: RecentSet::default(),
        };
        let watchers = Arc::new(Watchers::new(options.clone(), connection.clone(), listener.clone()));
        (StoreParts { options, connection, listener, locks, watchers, profile: OnceLock::new() }, task)
    }

    fn on_listen_event(&self, event: ListenEvent) {
        match event {
            ListenEvent::Disconnected => {
                self.locks.waiters.on_disconnect();
                self.watchers.on_disconnect();
            }
            ListenEvent::Notification { channel, payload } if channel == self.listener.wake_channel() => {
                self.locks.waiters.wake(&payload);
            }
            ListenEvent::Notification { channel, .. } if channel == self.listener.probe_channel() => {
                self.listener.probe_arrived();
            }
            // An event; or a notification for another client, through a pooler.
            ListenEvent::Notification { channel, payload } => self.watchers.emit(&channel, &payload),
        }
    }
}

#[async_trait]
impl Locks for PostgresStore {
    fn profile(&self) -> Profile {
        self.parts.profile.get().expect("set when the store was opened").clone()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        self.parts.locks.acquire(request).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        renew::renew(&self.parts.connection, grants).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.parts.locks.release(key).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        inspect::inspect(&self.parts.connection, name).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        inspect::list(&self.parts.connection, prefix, page).await
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.parts.watchers.watch(prefix).await
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        break_lock::revoke(&self.parts.connection, name, reason).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        break_lock::break_lock(&self.parts.connection, name, reason).await
    }
}
