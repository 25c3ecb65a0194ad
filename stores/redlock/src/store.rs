//! The store: what its clones share, and the trait `Locks`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::vote::majority;
use lockkeeper_core::{
    AcquireOutcome, Error, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};
use lockkeeper_redis::{Connection, Listener};
use lockkeeper_store_kit::{IoThread, Task};
use tokio::runtime::Handle;

use crate::acquire::Acquirer;
use crate::break_lock::LockBreaker;
use crate::config::Options;
use crate::connection::RedlockNode;
use crate::counters::Counters;
use crate::error::unsupported;
use crate::inspect::Viewer;
use crate::keys::Keys;
use crate::profile;
use crate::quorum::Quorum;
use crate::release::Releaser;
use crate::renew::Renewer;
use crate::unknown::PendingAttempts;
use crate::waiters::Waiters;

/// Locks by the vote of several Redis servers. Clones share everything.
#[derive(Clone)]
pub struct RedlockStore {
    inner: Arc<RedlockInner>,
    // The last field: dropping the thread ends every task that runs on it.
    _io_thread: Arc<(IoThread, Vec<Task<()>>)>,
}

/// The parts of a store.
struct RedlockInner {
    options: Arc<Options>,
    profile: Profile,
    acquirer: Acquirer,
    renewer: Renewer,
    releaser: Releaser,
    breaker: LockBreaker,
    viewer: Viewer,
}

impl std::fmt::Debug for RedlockStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedlockStore({:?})", self.inner.options.nodes)
    }
}

impl RedlockStore {
    /// Connects, checks the nodes, and refuses servers that cannot keep locks. The profile's findings name the unreachable nodes.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if less than a majority answers, [`Error::Denied`] if the password is wrong,
    /// [`Error::Invalid`] or [`Error::Unsupported`] if a server cannot keep locks, or is in the list twice.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let io_thread = IoThread::start("lockkeeper-redlock")
            .map_err(|error| Error::Unavailable(format!("no thread for the connections: {error}")))?;
        let size = majority(options.nodes.len())?;
        let keys = Arc::new(Keys::new(&options));
        let options = Arc::new(options);
        let waiters = Arc::new_cyclic(|weak: &Weak<Waiters>| {
            let nodes = open_nodes(&options, io_thread.handle(), weak);
            let (options, io_thread) = (options.clone(), io_thread.handle().clone());
            Waiters::new(Arc::new(Quorum { options, nodes, size, io_thread }), keys.clone())
        });
        let quorum = waiters.quorum.clone();
        let drain = |node: &Arc<RedlockNode>| io_thread.spawn(node.clone().drain(options.clock.clone()));
        let tasks = quorum.nodes.iter().map(drain).collect();
        let profile = profile::profile(&quorum, &keys).await?;
        let (counters, pending) =
            (Arc::new(Counters::new(options.clock.clone())), Arc::new(PendingAttempts::default()));
        let inner = RedlockInner {
            options,
            profile,
            acquirer: Acquirer {
                quorum: quorum.clone(),
                keys: keys.clone(),
                counters: counters.clone(),
                pending: pending.clone(),
                waiters,
            },
            renewer: Renewer {
                quorum: quorum.clone(),
                keys: keys.clone(),
                counters: counters.clone(),
                pending: pending.clone(),
            },
            releaser: Releaser {
                quorum: quorum.clone(),
                keys: keys.clone(),
                counters: counters.clone(),
                pending,
            },
            breaker: LockBreaker { quorum: quorum.clone(), keys: keys.clone(), counters },
            viewer: Viewer { quorum, keys },
        };
        Ok(RedlockStore { inner: Arc::new(inner), _io_thread: Arc::new((io_thread, tasks)) })
    }
}

impl RedlockStore {
    pub(crate) fn quorum(&self) -> &Quorum {
        &self.inner.viewer.quorum
    }
}

/// The nodes, each with a connection that hands its messages to the waiters.
fn open_nodes(options: &Options, io_thread: &Handle, waiters: &Weak<Waiters>) -> Vec<Arc<RedlockNode>> {
    let access = Arc::new(options.access.clone());
    let nodes = options.nodes.iter().enumerate().map(|(index, endpoint)| {
        let waiters = waiters.clone();
        let listener: Listener = Arc::new(move |event| {
            if let Some(waiters) = waiters.upgrade() {
                waiters.on_push(index, event);
            }
        });
        let connection = Connection::new(endpoint.clone(), access.clone(), io_thread.clone(), Some(listener));
        RedlockNode::new(index, connection, access.timeout * 2 + Duration::from_secs(10))
    });
    nodes.collect()
}

#[async_trait]
impl Locks for RedlockStore {
    fn profile(&self) -> Profile {
        self.inner.profile.clone()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.inner.acquirer.check(request)?;
        self.inner.acquirer.acquire(request).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.inner.renewer.renew(grants).await
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.inner.releaser.release(key).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.inner.viewer.view(name).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.inner.viewer.page(prefix, page).await
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        Err(unsupported("events to watch"))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.inner.breaker.revoke(name, reason).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.inner.breaker.break_lock(name, reason).await
    }
}
