use std::fmt;
use std::sync::Arc;

use lockkeeper_core::{
    Attempt, Error, EventStream, Fence, LockName, LockPage, LockView, Names, Owner, Page, Profile, Result,
    Store, limits,
};
use lockkeeper_host::{Clock, SystemClock, host_name, random_128};

use crate::builder::LockBuilder;
use crate::driver::Driver;
use crate::open;
use crate::own_process::{self, OwnProcess};

/// The door to one store: asks for locks, and keeps the ones it was given. Clones share everything.
///
/// It belongs to the process that opened it. In a fork of that process it refuses everything with [`Error::Unavailable`], and its guards are
/// lost: open the store anew there.
#[derive(Clone)]
pub struct Lockkeeper(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub store: Arc<dyn Store>,
    pub clock: Arc<dyn Clock>,
    pub profile: Profile,
    pub host: String,
    /// For what only this store can do.
    #[cfg(feature = "postgres")]
    pub postgres: Option<lockkeeper_postgres::PostgresStore>,
    /// The process that opened it.
    pid: u32,
    driver: Result<Driver>,
}

impl Inner {
    /// The thread that renews and releases. An error if it or the timers could not be started, or if this is a fork of the process that
    /// has them: then no lock may be asked for.
    pub fn driver(&self) -> Result<&Driver> {
        own_process::check(self.pid)?;
        self.driver.as_ref().map_err(Clone::clone)
    }

    /// Whether this is a fork of the process that opened it.
    pub fn forked(&self) -> bool {
        own_process::check(self.pid).is_err()
    }
}

/// Starts what a keeper depends on: nothing that the truth about a lock hangs on is made later, when nobody would take an error.
fn start(store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<Driver> {
    let started = clock.start().and_then(|()| Driver::start(store.clone(), clock.clone()));
    started.map_err(no_timers)
}

fn no_timers(error: std::io::Error) -> Error {
    Error::Unavailable(format!(
        "no thread or no file descriptor is left to renew locks and to keep deadlines with: {error}"
    ))
}

impl fmt::Debug for Lockkeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lockkeeper({})", self.0.profile.store)
    }
}

impl Lockkeeper {
    /// Opens the store that `url` names and checks that it can be used. See [`crate::schemes`] for the ones known.
    pub async fn open(url: &str) -> Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        clock.start().map_err(no_timers)?;
        #[cfg(feature = "postgres")]
        if crate::postgres::is(url) {
            return Self::with_postgres(crate::postgres::open(url, clock.clone()).await?, clock).started();
        }
        let store = open::open(url, clock.clone()).await?;
        Self::with_store(store, clock).started()
    }

    fn started(self) -> Result<Self> {
        self.0.driver()?;
        Ok(self)
    }

    /// A keeper of a store that is open already, going by `clock`. If its thread or its timers cannot be started, every lock that is asked
    /// for is refused with [`Error::Unavailable`].
    pub fn with_store(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Self {
        Lockkeeper(Arc::new(Inner::new(store, clock)))
    }
}

impl Inner {
    pub fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Self {
        let profile = store.profile();
        for note in &profile.notes {
            tracing::debug!(store = profile.store, "{note}");
        }
        let driver = start(&store, &clock);
        Inner {
            store: Arc::new(OwnProcess::new(store)),
            clock,
            profile,
            host: host_name(),
            #[cfg(feature = "postgres")]
            postgres: None,
            pid: std::process::id(),
            driver,
        }
    }
}

impl Lockkeeper {
    /// What the store keeps and what it does not.
    pub fn profile(&self) -> &Profile {
        &self.0.profile
    }

    /// The store itself.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    /// Begins to ask for one lock. A bad name is told by the call that acquires.
    pub fn lock(&self, name: impl AsRef<str>) -> LockBuilder {
        LockBuilder::new(self.clone(), LockName::new(name).map(Names::from))
    }

    /// Begins to ask for several locks at once: all or nothing, one fence, one deadline. The order does not matter, so
    /// two that ask for the same names in different order cannot block each other.
    pub fn lock_all<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> LockBuilder {
        let names: Result<Vec<LockName>> = names.into_iter().map(LockName::new).collect();
        LockBuilder::new(self.clone(), names.and_then(Names::new))
    }

    /// A new owner, for asks that are to enter each other's locks: see [`LockBuilder::owner`].
    pub fn new_owner() -> Owner {
        Owner::from_bytes(random_128())
    }

    /// A new attempt, for one who wants to write it down before asking: see [`LockBuilder::attempt`].
    pub fn new_attempt() -> Attempt {
        Attempt::from_bytes(random_128())
    }

    /// One lock as it is now: who holds it, who waits. `None`: it is free.
    pub async fn inspect(&self, name: impl AsRef<str>) -> Result<Option<LockView>> {
        self.0.store.inspect(&LockName::new(name)?).await
    }

    /// The locks that are held, waited for or held back and whose names begin with `prefix`, a page at a time.
    pub async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.0.store.list(prefix, page).await
    }

    /// What happens from now on to locks whose names begin with `prefix`.
    pub async fn watch(&self, prefix: &str) -> Result<EventStream> {
        if !self.0.profile.watch {
            return Err(Error::Unsupported(format!("the {} store cannot be watched", self.0.profile.store)));
        }
        self.0.store.watch(prefix).await
    }

    /// Asks the holders of a lock to give it back, without letting anybody else in before they have stopped. Each is told `reason` at its next
    /// renewal, within a third of its ttl: its guard is lost, its work ends, and it releases the lock. A holder that does not keeps it until
    /// its lease is over, which is not renewed any more. Returns a fence that is newer than every grant before.
    ///
    /// [`Error::Unsupported`] on a store that cannot ([`Profile::revoke`]): there is only [`Lockkeeper::break_lock`].
    pub async fn revoke(&self, name: impl AsRef<str>, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.0.store.revoke(&LockName::new(name)?, reason).await
    }

    /// Takes a lock away from whoever holds it, and lets the next one in at once; returns the fence that moved on. Whoever held it learns of it
    /// at its next renewal, and runs beside the next one until then: only a resource that checks the fence is safe from it.
    pub async fn break_lock(&self, name: impl AsRef<str>, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.0.store.break_lock(&LockName::new(name)?, reason).await
    }

    /// Waits until everything that was handed to the background is done: releases of dropped guards, above all. Worth
    /// calling before the process ends, because what is not released then is held until its ttl.
    pub async fn settle(&self) {
        if let Ok(driver) = self.0.driver() {
            driver.settle().await;
        }
    }

    /// For tests on a virtual clock: waits until nothing is left to do before that clock goes on.
    #[doc(hidden)]
    pub async fn quiesce(&self) {
        if let Ok(driver) = self.0.driver() {
            driver.quiesce().await;
        }
    }
}
