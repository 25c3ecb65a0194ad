use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::vote::majority;
use lockkeeper_core::{
    Acquired, Ask, Claim, Error, EventStream, Fence, Grant, LockName, LockPage, LockView, Locks, Page,
    Profile, Release, Renewal, Result, limits,
};
use lockkeeper_host::{Reactor, Task};
use lockkeeper_redis::{Heard, Link, Listener};
use tokio::runtime::Handle;

use crate::acquire::unsupported;
use crate::config::Options;
use crate::errand::Errands;
use crate::line::Line;
use crate::node::Node;
use crate::open;

/// The one counter of fences of a node. It has no expiry.
pub(crate) const COUNTER: &str = "lockkeeper:{all}:fence";

/// Locks by the vote of several Redis servers. Clones share everything.
#[derive(Clone)]
pub struct RedlockStore {
    pub(crate) shared: Arc<Shared>,
    // Goes last: with it goes the thread, and everything that runs there.
    _reactor: Arc<(Reactor, Vec<Task<()>>)>,
}

/// What the store and the tasks on its thread have in common.
pub(crate) struct Shared {
    pub options: Options,
    pub nodes: Vec<Arc<Node>>,
    pub quorum: usize,
    pub reactor: Handle,
    pub errands: Errands,
    pub line: Line,
    /// The highest fence that we have seen.
    pub floor: AtomicU64,
    rounds: AtomicU64,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for RedlockStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedlockStore({:?})", self.shared.options.nodes)
    }
}

impl RedlockStore {
    /// Connects, looks at the nodes, and refuses what cannot work. Nodes that are away are told in the profile's notes.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if less than a majority answers, [`Error::Denied`] if the password is wrong,
    /// [`Error::Invalid`] or [`Error::Unsupported`] if a server is not one to keep locks in, or is there twice.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let reactor = Reactor::start("lockkeeper-redlock")
            .map_err(|error| Error::Unavailable(format!("no thread for the connections: {error}")))?;
        let quorum = majority(options.nodes.len())?;
        let shared = Arc::new_cyclic(|weak| Shared::new(options, quorum, reactor.handle().clone(), weak));
        let pay = |node: &Arc<Node>| reactor.spawn(node.clone().pay(shared.options.clock.clone()));
        let tasks = shared.nodes.iter().map(pay).collect();
        let profile = open::profile(&shared).await?;
        _ = shared.profile.set(profile);
        Ok(RedlockStore { shared, _reactor: Arc::new((reactor, tasks)) })
    }
}

impl Shared {
    fn new(options: Options, quorum: usize, reactor: Handle, weak: &Weak<Shared>) -> Self {
        let access = Arc::new(options.access.clone());
        let nodes = options.nodes.iter().enumerate().map(|(index, door)| {
            let weak = weak.clone();
            let listener: Listener = Arc::new(move |heard| {
                if let Some(shared) = weak.upgrade() {
                    shared.heard(index, heard);
                }
            });
            let link = Link::new(door.clone(), access.clone(), reactor.clone(), Some(listener));
            Node::new(index, link, access.timeout * 2 + Duration::from_secs(10))
        });
        Shared {
            nodes: nodes.collect(),
            options,
            quorum,
            reactor,
            errands: Errands::default(),
            line: Line::default(),
            floor: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            profile: OnceLock::new(),
        }
    }

    fn heard(&self, node: usize, heard: Heard) {
        match heard {
            Heard::Gone => self.line.deaf(node),
            Heard::Message { channel, text } => {
                if let Some(key) = channel.strip_prefix(self.channel("").as_bytes()) {
                    self.line.freed(key, &text);
                }
            }
        }
    }

    /// The key of a lock: the prefix and the name, nothing else, because that is what other clients use.
    pub fn key(&self, name: &LockName) -> String {
        format!("{}{name}", self.options.prefix)
    }

    /// The key of a lock, and that of what we write beside it.
    pub fn keys(&self, name: &LockName) -> [String; 2] {
        let key = self.key(name);
        let vote = format!("lockkeeper:{{all}}:vote:{key}");
        [key, vote]
    }

    /// Where the release of a lock is told.
    pub fn channel(&self, key: &str) -> String {
        format!("lockkeeper:free:{}:{key}", self.options.access.db)
    }

    /// How long a node has for an answer: well within the lease.
    pub fn patience(&self, ttl: Duration) -> Duration {
        self.options.node_timeout.min(ttl / 4)
    }

    /// The number of the next round. Higher than all before, also than those of a process of ours that is gone.
    pub fn number(&self) -> u64 {
        let wall = self.options.clock.wall().as_micros();
        let next = |last: u64| (last + 1).max(wall);
        let last = self.rounds.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(next(last)));
        next(last.unwrap_or_else(|last| last))
    }

    /// Notes a fence: whatever happens to the nodes, the next one that this process gets is higher.
    pub fn seen(&self, fence: Fence) {
        self.floor.fetch_max(fence.get(), Ordering::Relaxed);
    }
}

#[async_trait]
impl Locks for RedlockStore {
    fn profile(&self) -> Profile {
        self.shared.profile.get().expect("set when it was opened").clone()
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        self.shared.check(ask)?;
        self.shared.acquire(ask).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        self.shared.renew(grants).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.shared.release(claim).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.shared.view(name).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.shared.page(prefix, page).await
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        Err(unsupported("events to watch"))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.shared.revoke(name, reason).await
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.shared.break_lock(name, reason).await
    }
}
