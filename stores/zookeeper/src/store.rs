use std::future::Future;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use lockkeeper_core::{
    Acquired, Ask, Claim, Error, EventStream, Fence, Grant, LockName, LockPage, LockView, Locks, Page,
    Profile, Release, Renewal, Result, limits,
};
use lockkeeper_host::{Clock, Reactor, Remembered, Task};

use crate::back::Sights;
use crate::base::Base;
use crate::book::{self, Book};
use crate::config::Options;
use crate::fading::{self, Fading};
use crate::lane::{self, Lane};
use crate::layout::{self, Layout};
use crate::link::Link;
use crate::open;
use crate::watch::{self, Watch};

/// Locks and records in ZooKeeper. Clones share everything.
#[derive(Clone)]
pub struct ZooKeeperStore {
    pub(crate) shared: Arc<Shared>,
    // Goes last: with it goes the thread, and everything that runs there.
    reactor: Arc<(Reactor, [Task<()>; 4])>,
}

/// What the store and the tasks on its thread have in common.
pub(crate) struct Shared {
    pub options: Options,
    pub clock: Arc<dyn Clock>,
    pub layout: Layout,
    pub link: Link,
    pub lane: Lane,
    pub book: Book,
    pub watch: Watch,
    pub fading: Fading,
    pub sights: Sights,
    /// What is added to a zxid to make it a fence.
    pub base: Mutex<Base>,
    /// The highest fence that we have seen.
    pub floor: AtomicU64,
    /// The lines that had a node when we last asked.
    pub lines: Remembered<LockName>,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for ZooKeeperStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ZooKeeperStore({:?})", self.shared.options.servers)
    }
}

impl ZooKeeperStore {
    /// Connects, looks at the server, and refuses what cannot work.
    ///
    /// # Errors
    /// [`Error::Unavailable`] or [`Error::Unknown`] if nobody answers, [`Error::Denied`] if the password is wrong or a
    /// right is missing, [`Error::Invalid`] if the path of the address is not there, [`Error::Unsupported`] if the server
    /// is too old.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let reactor = Reactor::start("lockkeeper-zookeeper")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let (lane, depot) = lane::lane();
        let shared = Arc::new(Shared {
            clock: options.clock.clone(),
            layout: Layout::new(&options.base),
            link: Link::new(&options),
            lane,
            options,
            book: Book::default(),
            watch: Watch::default(),
            fading: Fading::default(),
            sights: Sights::default(),
            base: Mutex::default(),
            floor: AtomicU64::new(0),
            lines: Remembered::default(),
            profile: OnceLock::new(),
        });
        let tasks = [
            reactor.spawn(book::attend(shared.clone())),
            reactor.spawn(watch::attend(shared.clone())),
            reactor.spawn(fading::attend(shared.clone())),
            reactor.spawn(lane::attend(depot)),
        ];
        let store = ZooKeeperStore { shared, reactor: Arc::new((reactor, tasks)) };
        let profile = store.run(open::profile(&store.shared)).await?;
        _ = store.shared.profile.set(profile);
        Ok(store)
    }

    /// Does something with the sockets and timers of the store's own thread. Dropping this ends it.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.reactor.0.lend(work).await
    }
}

#[async_trait]
impl Locks for ZooKeeperStore {
    fn profile(&self) -> Profile {
        self.shared.profile.get().expect("set when it was opened").clone()
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        ask.check()?;
        self.run(self.shared.acquire(ask)).await
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        self.run(self.shared.renew(grants)).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let mark = layout::mark(&claim.attempt);
        Ok(self.run(self.shared.release_mark(&claim.names, mark)).await?)
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.run(self.shared.view(name)).await
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.run(self.shared.page(prefix, page)).await
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
