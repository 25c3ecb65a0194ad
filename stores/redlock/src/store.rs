//! The store: what its clones share, and the trait `Locks`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::vote::majority;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_redis::{Connection, Listener, PushEvent};
use lockkeeper_store_kit::{IoThread, Task};
use tokio::runtime::Handle;

use crate::acquire::unsupported;
use crate::config::Options;
use crate::connection::RedlockNode;
use crate::profile;
use crate::unknown::PendingAttempts;
use crate::waiters::Waiters;

/// The one counter of fences of a node. It has no expiry.
pub(crate) const FENCE_COUNTER: &str = "lockkeeper:{all}:fence";

/// Locks by the vote of several Redis servers. Clones share everything.
#[derive(Clone)]
pub struct RedlockStore {
    pub(crate) inner: Arc<RedlockInner>,
    // The last field: dropping the thread ends every task that runs on it.
    _io_thread: Arc<(IoThread, Vec<Task<()>>)>,
}

/// The state that all clones of a store and the tasks on its thread share.
pub(crate) struct RedlockInner {
    pub options: Options,
    pub nodes: Vec<Arc<RedlockNode>>,
    pub quorum: usize,
    pub io_thread: Handle,
    pub pending: PendingAttempts,
    pub waiters: Waiters,
    /// The highest fence that we have seen.
    pub highest_fence_seen: AtomicU64,
    last_round: AtomicU64,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for RedlockStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedlockStore({:?})", self.inner.options.nodes)
    }
}

impl RedlockStore {
    /// Connects, checks the nodes, and refuses servers that cannot keep locks. The profile's notes name the unreachable nodes.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if less than a majority answers, [`Error::Denied`] if the password is wrong,
    /// [`Error::Invalid`] or [`Error::Unsupported`] if a server cannot keep locks, or is in the list twice.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io_thread = IoThread::start("lockkeeper-redlock")
            .map_err(|error| Error::Unavailable(format!("no thread for the connections: {error}")))?;
        let quorum = majority(options.nodes.len())?;
        let inner =
            Arc::new_cyclic(|weak| RedlockInner::new(options, quorum, io_thread.handle().clone(), weak));
        let drain =
            |node: &Arc<RedlockNode>| io_thread.spawn(node.clone().drain(inner.options.clock.clone()));
        let tasks = inner.nodes.iter().map(drain).collect();
        let profile = profile::profile(&inner).await?;
        _ = inner.profile.set(profile);
        Ok(RedlockStore { inner, _io_thread: Arc::new((io_thread, tasks)) })
    }
}

impl RedlockInner {
    fn new(options: Options, quorum: usize, io_thread: Handle, weak: &Weak<RedlockInner>) -> Self {
        let access = Arc::new(options.access.clone());
        let nodes = options.nodes.iter().enumerate().map(|(index, endpoint)| {
            let weak = weak.clone();
            let listener: Listener = Arc::new(move |event| {
                if let Some(inner) = weak.upgrade() {
                    inner.on_push(index, event);
                }
            });
            let connection =
                Connection::new(endpoint.clone(), access.clone(), io_thread.clone(), Some(listener));
            RedlockNode::new(index, connection, access.timeout * 2 + Duration::from_secs(10))
        });
        RedlockInner {
            nodes: nodes.collect(),
            options,
            quorum,
            io_thread,
            pending: PendingAttempts::default(),
            waiters: Waiters::default(),
            highest_fence_seen: AtomicU64::new(0),
            last_round: AtomicU64::new(0),
            profile: OnceLock::new(),
        }
    }

    fn on_push(&self, node: usize, event: PushEvent) {
        match event {
            PushEvent::Disconnected => self.waiters.on_disconnect(node),
            PushEvent::Message { channel, text } => {
                if let Some(key) = channel.strip_prefix(self.channel("").as_bytes()) {
                    self.waiters.on_released(key, &text);
                }
            }
        }
    }

    /// The key of a lock: the prefix and the name, nothing else, because other Redlock clients use the same.
    pub fn key(&self, name: &LockName) -> String {
        format!("{}{name}", self.options.prefix)
    }

    /// The key of a lock, and the key of the metadata beside it.
    pub fn keys(&self, name: &LockName) -> [String; 2] {
        let key = self.key(name);
        let vote = format!("lockkeeper:{{all}}:vote:{key}");
        [key, vote]
    }

    /// The channel on which the release of a lock is published.
    pub fn channel(&self, key: &str) -> String {
        format!("lockkeeper:free:{}:{key}", self.options.access.db)
    }

    /// How long a node has for an answer: well within the lease.
    pub fn node_timeout(&self, ttl: Duration) -> Duration {
        self.options.node_timeout.min(ttl / 4)
    }

    /// The number of the next round. It is higher than all before, also than those of an earlier process.
    pub fn next_round(&self) -> u64 {
        let wall = self.options.clock.wall().as_micros();
        let next = |last: u64| (last + 1).max(wall);
        let last =
            self.last_round.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(next(last)));
        next(last.unwrap_or_else(|last| last))
    }

    /// Notes a fence: whatever happens to the nodes, the next one that this process gets is higher.
    pub fn record_fence(&self, fence: Fence) {
        self.highest_fence_seen.fetch_max(fence.get(), Ordering::Relaxed);
    }
}

#[async_trait]
impl Locks for RedlockStore {
    fn profile(&self) -> Profile {
        self.inner.profile.get().expect("set when it was opened").clone()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.inner.check(request)?;
        self.inner.acquire(request).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.inner.renew(grants).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.inner.release(key).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.inner.view(name).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.inner.page(prefix, page).await
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        Err(unsupported("events to watch"))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.inner.revoke(name, reason).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.inner.break_lock(name, reason).await
    }
}
