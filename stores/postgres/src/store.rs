use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    Acquired, Ask, Attempt, Claim, Error, EventStream, Fence, Grant, LockName, LockPage, LockView, Locks,
    Page, Profile, Release, Renewal, Result, limits,
};
use lockkeeper_host::{Reactor, Remembered, Task, random_128};

use crate::config::Options;
use crate::doubt::Doubts;
use crate::entry::hex;
use crate::fault::Failure;
use crate::lane::Lane;
use crate::line::{Line, jitter};
use crate::link::{Heard, Link, Listener, Role, first};
use crate::script::{SWEEPS, TIDY};
use crate::watch::Watch;
use crate::{doubt, lane, line, open, watch};

/// Locks and records in PostgreSQL. Clones share everything.
#[derive(Clone)]
pub struct PostgresStore {
    pub(crate) shared: Arc<Shared>,
    // Goes last: with it goes the thread, and everything that runs there.
    _reactor: Arc<(Reactor, [Task<()>; 5])>,
}

/// What the store and the tasks on its thread have in common.
pub(crate) struct Shared {
    pub options: Arc<Options>,
    /// Where everything is asked.
    pub link: Link,
    /// Where messages come. It is made when the first waits or watches.
    pub ear: Link,
    /// Where asks and releases are handed in, to travel together.
    pub lane: Lane,
    pub line: Line,
    pub doubts: Doubts,
    /// The names at which somebody was met lately: the usual way is not tried there.
    pub crowded: Remembered<LockName>,
    /// What was granted in the usual way, and may be given back so.
    pub plain: Remembered<Attempt>,
    pub watch: Watch,
    /// Who we are to the database: the places in line of a process go with it.
    pub client: String,
    /// Whether messages come through.
    hears: AtomicBool,
    /// What came on the channel by which this is tried.
    pub tried: tokio::sync::Notify,
    profile: OnceLock<Profile>,
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PostgresStore({:?})", self.shared.options)
    }
}

impl PostgresStore {
    /// Connects, makes the schema if it is not there, looks at the server, and refuses what cannot work.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if nobody answers or it is a standby, [`Error::Denied`] if the password is wrong or a right
    /// is missing (with the SQL to run), [`Error::Invalid`] or [`Error::Unsupported`] if the server is not one to keep
    /// locks in.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let reactor = match &options.runtime {
            Some(runtime) => Reactor::on(runtime.clone()),
            None => Reactor::start("lockkeeper-postgres")
                .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?,
        };
        let (lane, depot) = lane::lane();
        let shared = Arc::new_cyclic(|weak| Shared::new(Arc::new(options), &reactor, weak.clone(), lane));
        let tasks = [
            reactor.spawn(lane::attend(shared.clone(), depot)),
            reactor.spawn(line::attend(shared.clone())),
            reactor.spawn(doubt::attend(shared.clone())),
            reactor.spawn(watch::attend(shared.clone())),
            reactor.spawn(tidy(shared.clone())),
        ];
        let store = PostgresStore { shared: shared.clone(), _reactor: Arc::new((reactor, tasks)) };
        let profile = open::profile(&shared).await?;
        _ = shared.profile.set(profile);
        Ok(store)
    }
}

/// Clears away what nobody uses any more, now and then. Whoever comes first does it for all.
async fn tidy(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(jitter(Duration::from_secs(600))).await;
        if let Err(failure) = sweep(&shared).await {
            tracing::debug!(?failure, "could not tidy up, will try again");
        }
    }
}

/// In portions: asks and renewals are on the same connection.
async fn sweep(shared: &Shared) -> Result<(), Failure> {
    if !first::<bool>(&shared.link.rows(&TIDY, &[]).await?, 0)? {
        return Ok(());
    }
    for sweep in &SWEEPS {
        let mut after = Some(String::new());
        while let Some(last) = after {
            after = first(&shared.link.rows(sweep, &[&last]).await?, 0)?;
        }
    }
    Ok(())
}

impl Shared {
    fn new(options: Arc<Options>, reactor: &Reactor, weak: Weak<Shared>, lane: Lane) -> Self {
        let listener: Listener = Arc::new(move |heard| {
            if let Some(shared) = weak.upgrade() {
                shared.heard(heard);
            }
        });
        let client = hex(&random_128()[..8]);
        let link = |role| Link::new(options.clone(), reactor.handle().clone(), role);
        Shared {
            link: link(Role::Speak(client.clone())),
            ear: link(Role::Hear(listener)),
            options,
            lane,
            line: Line::default(),
            doubts: Doubts::default(),
            crowded: Remembered::default(),
            plain: Remembered::default(),
            watch: Watch::default(),
            client,
            hears: AtomicBool::new(false),
            tried: tokio::sync::Notify::new(),
            profile: OnceLock::new(),
        }
    }

    fn heard(self: &Arc<Self>, heard: Heard) {
        match heard {
            Heard::Gone => {
                self.line.deaf();
                self.watch.deaf();
            }
            Heard::Message { channel, text } if channel == self.wake_channel() => self.line.call(self, &text),
            Heard::Message { channel, text } if channel == self.events_channel() => self.watch.tell(&text),
            Heard::Message { channel, .. } if channel == self.try_channel() => self.tried.notify_one(),
            // Somebody else's, by way of a pooler.
            Heard::Message { .. } => {}
        }
    }

    pub fn wake_channel(&self) -> String {
        format!("lockkeeper_{}", self.client)
    }

    pub fn try_channel(&self) -> String {
        format!("lockkeeper_try_{}", self.client)
    }

    pub fn events_channel(&self) -> String {
        format!("lockkeeper_events_{}", self.options.schema)
    }

    /// Whether messages come through to us.
    pub fn hears(&self) -> bool {
        self.hears.load(Ordering::Relaxed)
    }

    pub fn set_hears(&self) {
        self.hears.store(true, Ordering::Relaxed);
    }

    /// Listens on a channel from now on. Whether it could.
    pub async fn listen(&self, channel: &str) -> bool {
        let listened = async { self.ear.live().await?.run(&format!("LISTEN {channel}")).await };
        match listened.await {
            Ok(()) => true,
            Err(failure) => {
                tracing::debug!(?failure, "no messages for now: waiting goes on by looking");
                false
            }
        }
    }
}

#[async_trait]
impl Locks for PostgresStore {
    fn profile(&self) -> Profile {
        self.shared.profile.get().expect("set when it was opened").clone()
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        ask.check()?;
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

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.shared.watch(prefix).await
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
