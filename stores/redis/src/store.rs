use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use lockkeeper_core::{
    Acquired, Ask, Claim, Error, EventStream, Fence, Grant, LockName, LockPage, LockView, Locks, Page,
    Profile, Release, Renewal, Result, limits,
};
use lockkeeper_host::{Reactor, Task, random_128};

use crate::config::{Options, Servers};
use crate::fleet::Fleet;
use crate::hold::millis;
use crate::lane::{Errand, Lane};
use crate::layout::{Group, Layout};
use crate::line::Line;
use crate::link::{Heard, Listener};
use crate::open::Settings;
use crate::unknown::Unknown;
use crate::watch::Watch;
use crate::{lane, line, open, unknown, watch};

/// Locks and records in Redis. Clones share everything.
#[derive(Clone)]
pub struct RedisStore {
    pub(crate) shared: Arc<Shared>,
    // Goes last: with it goes the thread, and everything that runs there.
    _reactor: Arc<(Reactor, [Task<()>; 7])>,
}

/// What the store and the tasks on its thread have in common.
pub(crate) struct Shared {
    pub options: Options,
    pub layout: Layout,
    pub fleet: Fleet,
    /// Connections for grants that wait for replicas, which would hold up everything else behind them.
    pub grants: Option<Fleet>,
    /// Where asks and releases are handed in, to travel together.
    pub asks: Lane,
    pub releases: Lane,
    /// Where waiters that were let in confirm.
    pub confirms: Lane,
    pub line: Line,
    pub watch: Watch,
    pub unknown: Unknown,
    /// Who we are to the server: the places in line of a process go with it.
    pub client: String,
    /// The highest fence that we have seen.
    pub floor: AtomicU64,
    /// How the servers are set up, and the profile that follows.
    pub settings: Settings,
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisStore({:?})", self.shared.options.servers)
    }
}

impl RedisStore {
    /// Connects, looks at the servers, and refuses what cannot work.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if nobody answers, [`Error::Denied`] if the password is wrong, [`Error::Invalid`] or
    /// [`Error::Unsupported`] if the server is not one to keep locks in.
    pub async fn open(options: Options) -> Result<Self> {
        options.check()?;
        let reactor = Reactor::start("lockkeeper-redis")
            .map_err(|error| Error::Unavailable(format!("no thread for the connection: {error}")))?;
        let (asks, ask_depot) = lane::lane(Errand::Acquire);
        let (releases, release_depot) = lane::lane(Errand::Release);
        let (confirms, confirm_depot) = lane::lane(Errand::Confirm);
        let lanes = (asks, releases, confirms);
        let shared = Arc::new_cyclic(|weak| Shared::new(options, &reactor, weak.clone(), lanes));
        let tasks = [
            reactor.spawn(lane::attend(shared.clone(), ask_depot)),
            reactor.spawn(lane::attend(shared.clone(), release_depot)),
            reactor.spawn(lane::attend(shared.clone(), confirm_depot)),
            reactor.spawn(line::attend(shared.clone())),
            reactor.spawn(watch::attend(shared.clone())),
            reactor.spawn(unknown::attend(shared.clone())),
            reactor.spawn(open::attend(shared.clone())),
        ];
        let store = RedisStore { shared: shared.clone(), _reactor: Arc::new((reactor, tasks)) };
        open::open(&shared).await?;
        Ok(store)
    }
}

impl Shared {
    fn new(options: Options, reactor: &Reactor, weak: Weak<Shared>, lanes: (Lane, Lane, Lane)) -> Self {
        let (asks, releases, confirms) = lanes;
        let greeting = open::greeting(weak.clone());
        let listener: Listener = Arc::new(move |heard| {
            if let Some(shared) = weak.upgrade() {
                shared.heard(heard);
            }
        });
        let (servers, access) = (options.servers.clone(), options.access.clone());
        let fleet = Fleet::new(servers, access, reactor.handle().clone(), Some(listener), Some(greeting));
        Shared {
            layout: Layout::new(&options.prefix, matches!(options.servers, Servers::Cluster(_))),
            grants: (options.wait_replicas > 0).then(|| fleet.sibling()),
            fleet,
            line: Line::new(options.poll),
            options,
            asks,
            releases,
            confirms,
            watch: Watch::default(),
            unknown: Unknown::default(),
            client: random_128()[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
            floor: AtomicU64::new(0),
            settings: Settings::default(),
        }
    }

    fn heard(self: &Arc<Self>, heard: Heard) {
        match heard {
            Heard::Gone => {
                self.line.deaf();
                self.watch.deaf();
            }
            Heard::Message { channel, text } if channel == self.wake_channel().as_bytes() => {
                self.line.call(self, &text)
            }
            Heard::Message { text, .. } => self.watch.tell(&self.layout, &text),
        }
    }

    pub fn wake_channel(&self) -> String {
        format!("lockkeeper:wake:{}", self.client)
    }

    pub fn events_channel(&self) -> String {
        format!("lockkeeper:events:{}", self.options.access.db)
    }

    pub fn floor(&self) -> u64 {
        self.floor.load(Ordering::Relaxed)
    }

    pub fn claim_ms(&self) -> u64 {
        millis(self.options.claim)
    }

    pub fn scheme(&self) -> &'static str {
        match self.options.servers {
            Servers::Single(_) => "redis",
            Servers::Sentinel { .. } => "redis+sentinel",
            Servers::Cluster(_) => "redis+cluster",
        }
    }

    /// The keys that a script on some locks of a group needs.
    pub fn keys<K: AsRef<str>>(&self, group: Group, locks: impl IntoIterator<Item = K>) -> Vec<String> {
        let base = self.layout.base(group);
        let mut keys = Vec::new();
        keys.push(format!("{base}fence"));
        keys.push(format!("{base}watched"));
        keys.push(format!("{base}waited"));
        keys.extend(locks.into_iter().map(|key| key.as_ref().to_owned()));
        keys
    }
}

#[async_trait]
impl Locks for RedisStore {
    fn profile(&self) -> Profile {
        self.shared.settings.profile().expect("there is one from the opening on")
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        ask.check()?;
        self.shared.unknown.forget(&ask.claim);
        match self.shared.group_of(&ask.claim.names) {
            Some(group) => self.shared.acquire_in(group, ask, &[]).await,
            None => self.shared.acquire_across(&self.shared.parts(&ask.claim.names), ask).await,
        }
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        let mut claims: Vec<(usize, Group, Claim)> = Vec::with_capacity(grants.len());
        for (i, grant) in grants.iter().enumerate() {
            for (group, names) in self.shared.parts(&grant.claim.names) {
                claims.push((i, group, Claim { attempt: grant.claim.attempt, names }));
            }
        }
        let parts: Vec<(Group, &Claim)> = claims.iter().map(|(_, group, claim)| (*group, claim)).collect();
        let shortest = grants.iter().map(|grant| grant.ttl).min().unwrap_or_default();
        let mut answers = vec![Renewal::Renewed; grants.len()];
        for ((i, ..), answer) in claims.iter().zip(self.shared.renew_all(&parts, shortest).await?) {
            // A grant of several names is lost as a whole, and as good as the least that is known of it.
            answers[*i] = match (&answers[*i], answer) {
                (Renewal::Lost, _) | (_, Renewal::Lost) => Renewal::Lost,
                (Renewal::Revoked(reason), _) => Renewal::Revoked(reason.clone()),
                (_, revoked @ Renewal::Revoked(_)) => revoked,
                (Renewal::Unknown, _) | (_, Renewal::Unknown) => Renewal::Unknown,
                (Renewal::Renewed, Renewal::Renewed) => Renewal::Renewed,
            };
        }
        Ok(answers)
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.shared.line.leave(&claim.attempt.to_hex());
        match self.shared.group_of(&claim.names) {
            Some(group) => self.shared.release_in(group, claim).await,
            None => self.shared.release_across(&self.shared.parts(&claim.names), claim).await,
        }
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
        self.shared.break_in(name, reason).await
    }
}
