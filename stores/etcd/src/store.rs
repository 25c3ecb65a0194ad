use std::future::Future;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use lockkeeper_core::{
    Acquired, Ask, Claim, Error, EventStream, Fence, Grant, LockName, LockPage, LockView, Locks, Page,
    Profile, Release, Renewal, Result, limits,
};
use lockkeeper_host::{Clock, Reactor, Remembered, Task};

use crate::book::{self, Book};
use crate::config::Options;
use crate::lane::{self, Lane};
use crate::layout::{self, Layout};
use crate::lease::{self, Lease, Leases};
use crate::link::Link;
use crate::open;
use crate::seat::Seats;
use crate::spy::{self, Spy};
use crate::watch::{self, Watch};

/// Locks and records in etcd. Clones share everything.
#[derive(Clone)]
pub struct EtcdStore {
    pub(crate) shared: Arc<Shared>,
    // Goes last: with it goes the thread, and everything that runs there.
    reactor: Arc<(Reactor, [Task<()>; 5])>,
}

/// What the store and the tasks on its thread have in common.
pub(crate) struct Shared {
    pub options: Options,
    pub clock: Arc<dyn Clock>,
    pub layout: Layout,
    pub link: Link,
    pub lane: Lane,
    pub leases: Leases,
    /// The leases of the queue entries, one for each length.
    pub lines: Mutex<Vec<Arc<Lease>>>,
    pub spy: Spy,
    pub book: Book,
    pub seats: Seats,
    /// The names at which somebody was met lately. To ask there is to join the line in the same step, which costs etcd twice as
    /// much as to ask whether nobody is there: that is all that is asked elsewhere.
    pub crowded: Remembered<LockName>,
    pub watch: Watch,
    /// What is added to a revision to make it a fence.
    pub base: AtomicU64,
    /// The highest fence that we have seen.
    pub floor: AtomicU64,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EtcdStore({:?})", self.shared.options.servers)
    }
}

impl EtcdStore {
    /// Connects, looks at the server, and refuses what cannot work.
    ///
    /// # Errors
    /// [`Error::Unavailable`] or [`Error::Unknown`] if nobody answers, [`Error::Denied`] if the password is wrong or a
    /// right is missing, [`Error::Unsupported`] if the server is too old.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let reactor = Reactor::start("lockkeeper-etcd")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let (lane, depot) = lane::lane();
        let (leases, wishes) = lease::leases();
        let (spy, orders) = spy::spy();
        let shared = Arc::new(Shared {
            clock: options.clock.clone(),
            layout: Layout::new(&options.prefix),
            link: Link::new(&options)?,
            options,
            lane,
            leases,
            lines: Mutex::default(),
            spy,
            book: Book::default(),
            seats: Seats::default(),
            crowded: Remembered::default(),
            watch: Watch::default(),
            base: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            profile: OnceLock::new(),
        });
        let tasks = [
            reactor.spawn(lane::attend(shared.clone(), depot)),
            reactor.spawn(lease::attend(shared.clone(), wishes)),
            reactor.spawn(spy::attend(shared.clone(), orders)),
            reactor.spawn(book::attend(shared.clone())),
            reactor.spawn(watch::attend(shared.clone())),
        ];
        let store = EtcdStore { shared, reactor: Arc::new((reactor, tasks)) };
        // A member that hangs, or is cut off, is no reason not to open: what is asked here can be asked again.
        for left in (0..store.shared.options.servers.len()).rev() {
            match store.run(open::profile(&store.shared)).await {
                Err(error @ (Error::Unknown(_) | Error::Unavailable(_))) if left > 0 => {
                    tracing::debug!(%error, "another member is asked");
                }
                answer => {
                    _ = store.shared.profile.set(answer?);
                    break;
                }
            }
        }
        Ok(store)
    }

    /// Does something with the sockets and timers of the store's own thread. Dropping this ends it.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.reactor.0.lend(work).await
    }
}

#[async_trait]
impl Locks for EtcdStore {
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
