//! The entry point of the library: [`Lockkeeper`] and the state that its clones and guards share.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use lockkeeper_core::{
    Attempt, Error, EventStream, Fence, LockName, LockPage, LockView, Names, Owner, Page, Profile, Result,
    Store, limits,
};
use lockkeeper_host::{Clock, SystemClock, host_name, random_128};

use crate::builder::LockBuilder;
use crate::metrics::KeeperMetrics;
use crate::open;
use crate::own_process::{self, OwnProcess};
use crate::renewal::RenewalDriver;

/// A client of one store: it requests locks, and renews and releases the locks that it holds. Clones share
/// one connection, one thread and all state.
///
/// A keeper belongs to the process that opened it. In a fork of that process every call returns
/// [`Error::Unavailable`], and all guards are lost: the child process must open the store itself.
#[derive(Clone)]
pub struct Lockkeeper(pub(crate) Arc<KeeperState>);

pub(crate) struct KeeperState {
    pub store: Arc<dyn Store>,
    pub clock: Arc<dyn Clock>,
    pub host: String,
    /// The label of holders that were given none: the name that `ps` shows for this process.
    pub process_name: Option<String>,
    /// The PostgreSQL store, for the operations that only it has.
    #[cfg(feature = "postgres")]
    pub postgres: Option<lockkeeper_postgres::PostgresStore>,
    /// The process that opened the store.
    pid: u32,
    driver: Result<RenewalDriver>,
    pub metrics: KeeperMetrics,
}

impl KeeperState {
    /// The thread that renews and releases. Returns an error if the thread or the timers could not be
    /// started, or if this process is a fork of the one that runs them; then no lock may be requested.
    pub fn driver(&self) -> Result<&RenewalDriver> {
        own_process::check(self.pid)?;
        self.driver.as_ref().map_err(Clone::clone)
    }

    /// Whether this process is a fork of the one that opened the store.
    pub fn forked(&self) -> bool {
        own_process::check(self.pid).is_err()
    }
}

/// Starts the timers and the driver's thread. Both are started before the first request, because a guard
/// that exists must not need a thread or a descriptor that can no longer be created.
fn start(store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<RenewalDriver> {
    let started = clock.start().and_then(|()| RenewalDriver::start(store.clone(), clock.clone()));
    started.map_err(no_timers)
}

/// The file name in the first argument of a process, without control characters and with at most 64
/// characters. `None` if no character is left.
fn process_name(program: Option<&OsStr>) -> Option<String> {
    let name = Path::new(program?).file_name()?.to_string_lossy();
    let name: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    (!name.is_empty()).then_some(name)
}

fn no_timers(error: std::io::Error) -> Error {
    Error::Unavailable(format!(
        "no thread or no file descriptor is left for the timers and for the thread that renews locks: {error}"
    ))
}

impl fmt::Debug for Lockkeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lockkeeper({})", self.profile().store)
    }
}

impl Lockkeeper {
    /// Opens the store that `url` names, and checks that it can be used. [`crate::schemes`] lists the forms
    /// of a URL.
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

    /// A keeper of a store that is open already; all deadlines are measured on `clock`. If the driver's
    /// thread or the timers cannot be started, every lock request returns [`Error::Unavailable`].
    pub fn with_store(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Self {
        Lockkeeper(Arc::new(KeeperState::new(store, clock)))
    }
}

impl KeeperState {
    pub fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Self {
        let profile = store.profile();
        for finding in &profile.findings {
            tracing::debug!(store = profile.store, severity = finding.severity.as_str(), "{finding}");
        }
        let driver = start(&store, &clock);
        KeeperState {
            store: Arc::new(OwnProcess::new(store)),
            clock,
            host: host_name(),
            process_name: process_name(std::env::args_os().next().as_deref()),
            #[cfg(feature = "postgres")]
            postgres: None,
            pid: std::process::id(),
            driver,
            metrics: KeeperMetrics::default(),
        }
    }
}

impl Lockkeeper {
    /// The guarantees that the store declares now. They may change while the store is open: a Redis server gets a replica, or
    /// another setting.
    pub fn profile(&self) -> Profile {
        self.0.store.profile()
    }

    /// The store that this keeper uses.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    /// Starts a request for one lock. The call that acquires reports an invalid name.
    pub fn lock(&self, name: impl AsRef<str>) -> LockBuilder {
        LockBuilder::new(self.clone(), LockName::new(name).map(Names::from))
    }

    /// Starts a request for several locks: the store grants all of them or none, with one fence and one
    /// deadline. The order of the names does not matter, so two requests for the same names in different
    /// order cannot block each other.
    pub fn lock_all<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> LockBuilder {
        let names: Result<Vec<LockName>> = names.into_iter().map(LockName::new).collect();
        LockBuilder::new(self.clone(), names.and_then(Names::new))
    }

    /// A new owner, for requests that may share each other's locks: see [`LockBuilder::owner`].
    pub fn new_owner() -> Owner {
        Owner::from_bytes(random_128())
    }

    /// A new attempt, for a caller that stores it before it sends the request: see
    /// [`LockBuilder::attempt`].
    pub fn new_attempt() -> Attempt {
        Attempt::from_bytes(random_128())
    }

    /// One lock as the store sees it now: its holders and its queue. `None` means that the lock is free.
    pub async fn inspect(&self, name: impl AsRef<str>) -> Result<Option<LockView>> {
        self.0.store.inspect(&LockName::new(name)?).await
    }

    /// One page of the locks that are held, waited for or held back and whose names begin with `prefix`.
    pub async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.0.store.list(prefix, page).await
    }

    /// The events, from now on, of locks whose names begin with `prefix`.
    pub async fn watch(&self, prefix: &str) -> Result<EventStream> {
        if !self.profile().watch {
            return Err(Error::Unsupported(format!("the {} store cannot be watched", self.profile().store)));
        }
        self.0.store.watch(prefix).await
    }

    /// Requests the holders of a lock to release it; no waiter is granted the lock before they have
    /// stopped. Each holder receives `reason` with its next renewal, within a third of its ttl: its guard
    /// is lost, its work ends, and it releases the lock. A holder that does not react keeps the lock until
    /// its lease ends, because the store renews it no more. Returns a fence that is newer than every
    /// earlier grant.
    ///
    /// [`Error::Unsupported`] on a store without [`Profile::revoke`], where only [`Lockkeeper::break_lock`]
    /// is left.
    pub async fn revoke(&self, name: impl AsRef<str>, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        let name = LockName::new(name)?;
        let fence = self.0.store.revoke(&name, reason).await?;
        self.0.metrics.of(None, &name).count_break(true);
        Ok(fence)
    }

    /// Takes a lock away from its holders, and grants it to the next waiter at once. Returns a fence that
    /// is newer than every earlier grant. An old holder learns of the break with its next renewal and runs
    /// beside the new holder until then; only a resource that checks the fence is safe from its writes.
    pub async fn break_lock(&self, name: impl AsRef<str>, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        let name = LockName::new(name)?;
        let fence = self.0.store.break_lock(&name, reason).await?;
        self.0.metrics.of(None, &name).count_break(false);
        Ok(fence)
    }

    /// Waits until the releases that run in the background at the time of the call are done, such as those of
    /// dropped guards, or have failed for a ttl. It does not wait for releases that begin later. Call it before
    /// the process ends: a lock that was not released then is held until its ttl ends.
    pub async fn settle(&self) {
        if let Ok(driver) = self.0.driver() {
            driver.flush_releases().await;
        }
    }

    /// For tests on a virtual clock: waits until the driver has nothing to do before that clock advances.
    #[doc(hidden)]
    pub async fn quiesce(&self) {
        if let Ok(driver) = self.0.driver() {
            driver.quiesce().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn the_process_name_is_the_file_name_of_the_program() {
        let name = |program: &[u8]| process_name(Some(OsStr::from_bytes(program)));
        assert_eq!(name(b"/usr/local/bin/settle").as_deref(), Some("settle"));
        assert_eq!(name(b"./a\nb\x1b[31m").as_deref(), Some("ab[31m"), "no control characters");
        assert_eq!(name(b"caf\xff").as_deref(), Some("caf\u{fffd}"), "a name that is not UTF-8");
        assert_eq!(name(&[b'x'; 4000]).map(|name| name.len()), Some(64));
        assert_eq!((name(b""), name(b"/"), name(b"\n"), process_name(None)), (None, None, None, None));
        // The longest name that `process_name` returns is a valid label.
        let longest = name("\u{1f512}".repeat(100).as_bytes());
        assert!(lockkeeper_core::Holder::new("host", 1, longest).is_ok());
    }
}
