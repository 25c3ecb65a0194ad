//! The layer and its options: [`FenceLayer`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use lockkeeper::{Lockkeeper, Purpose};
use lockkeeper_core::{Error, Fence, LockName, Result};
use tower_layer::Layer;

use super::exclusive_marks::{GrantId, MarksLock};
use super::header;
use super::in_flight::{InFlightRequests, WriteAdmission};
use super::marks::HttpMarks;
use super::problem::Problem;
use super::service::Checked;
use crate::stale_counter::stale_counter;

/// Refuses stale fences, as the [module](super) says. Clones share everything.
#[derive(Clone)]
pub struct FenceLayer(Arc<FenceRules>);

/// Which requests must have a fence. One that has a fence is checked in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Require {
    /// All that may change something: not GET, HEAD, OPTIONS and TRACE, unless a header names another method.
    #[default]
    Unsafe,
    /// All.
    All,
    /// None: writers that know of no fence pass, and may be late.
    None,
}

/// The function that finds the resource of a request.
type ResourceOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Clone)]
pub(super) struct FenceRules {
    marks: HttpMarks,
    in_flight: InFlightRequests,
    resource: Arc<ResourceOf>,
    require: Require,
    wait: Duration,
}

impl fmt::Debug for FenceLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FenceLayer({:?}, {:?})", self.0.marks.keeper, self.0.marks.space)
    }
}

impl FenceLayer {
    /// Keeps the marks in the store of `keeper`, which should be one that lasts: a store that forgets a mark takes a late writer
    /// for a new one. `resource` says what is written to: a path, an account. `None`: the request does not say.
    ///
    /// Attach the layer *inside* the one that checks credentials: a client that may send a fence may send a
    /// high one, and shut all others out.
    ///
    /// [`Error::Unsupported`] if the store has no records.
    pub fn new(
        keeper: &Lockkeeper,
        resource: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Result<Self> {
        let profile = keeper.profile();
        if !profile.records {
            return Err(Error::Unsupported(format!(
                "the {} store has no records to keep marks in: use sqlite:PATH on one host, redis://HOST or etcd://HOSTS for a \
                 fleet",
                profile.store
            )));
        }
        let in_flight = InFlightRequests::default();
        // From now on the counter exists, also if no write is ever refused.
        stale_counter("http").increment(0);
        Ok(FenceLayer(Arc::new(FenceRules {
            marks: HttpMarks::new(keeper, "http".into(), in_flight.clone()),
            in_flight,
            resource: Arc::new(resource),
            require: Require::default(),
            wait: Duration::from_secs(30),
        })))
    }

    /// Which requests must have a fence: by default those that may change something.
    #[must_use]
    pub fn require(mut self, require: Require) -> Self {
        self.rules().require = require;
        self
    }

    /// How long a newer fence waits for older requests that are under way, before 503. 30 s by default. After a quarter of
    /// that time a client that is still reading the response to an older one is cut off: the layer reads the rest in its place, or
    /// drops it, if the request changes nothing.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.rules().wait = wait;
        self
    }

    /// Marks of its own, for services that share a store and have resources of the same name: 1 to 64 letters, digits, `-`, `_`
    /// and `.`; `http` by default. [`Error::Invalid`] if it is something else.
    pub fn space(mut self, space: impl Into<String>) -> Result<Self> {
        let space = space.into();
        let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !(1..=64).contains(&space.len()) || !space.chars().all(fine) {
            return Err(Error::invalid(format!(
                "{space:?} cannot name a space of marks: take 1 to 64 letters, digits, -, _ and ."
            )));
        }
        let rules = self.rules();
        rules.marks = rules.marks.in_space(space);
        Ok(self)
    }

    /// Holds the lock `fence/SPACE` exclusively from now on, so that no other process lets anything with a fence through at the same
    /// time (one that is not alone shares that lock, and clones of this layer from before share it too), and remembers the marks that it has seen: then most requests do not ask the store at all. It needs a runtime of tokio's,
    /// for a task of its own. Say [`FenceLayer::space`] first.
    ///
    /// While another process has the lock, or after it was lost, requests with a fence are answered with
    /// 503, and requests in flight are [overtaken](WriteAdmission::overtaken). After an unclean end (a crash, a
    /// store that was unreachable for longer than `ttl`) no process gets the lock for `lock_delay`, where
    /// the store supports that: choose the time for which your service may work on for a process that has
    /// ended.
    pub fn alone(mut self, ttl: Duration, lock_delay: Duration) -> Result<Self> {
        self.rules().marks.alone(ttl, lock_delay)?;
        Ok(self)
    }

    /// Whether requests with a fence can be let through: not if the lock of the marks is another's, or was lost.
    pub fn is_owner(&self) -> bool {
        self.0.marks.started().is_none_or(MarksLock::owns)
    }

    /// Asks for the lock of the marks, if nothing has so far, and ends when it is held. It needs a runtime of tokio's.
    pub async fn owned(&self) {
        if let Ok(owner) = self.0.marks.owner() {
            owner.owned().await;
        }
    }

    /// Gives the lock back, if it has one: nothing with a fence is let through any more, and another process may.
    pub async fn let_go(&self) {
        if let Some(owner) = self.0.marks.started() {
            owner.let_go().await;
        }
    }

    fn rules(&mut self) -> &mut FenceRules {
        Arc::make_mut(&mut self.0)
    }

    /// [`Error::Unsupported`] on a store that can forget a mark when it crashes.
    pub fn for_correctness(self) -> Result<Self> {
        self.0.marks.keeper.profile().allows(Purpose::Correctness)?;
        Ok(self)
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = Checked<S>;

    fn layer(&self, inner: S) -> Checked<S> {
        Checked { inner, rules: self.0.clone() }
    }
}

impl FenceRules {
    /// The fence and the resource of a request; `None` if it may pass without.
    pub fn presented(&self, parts: &Parts) -> std::result::Result<Option<(Fence, String)>, Problem> {
        match header::of(&parts.headers).map_err(Problem::Malformed)? {
            Some(fence) => match (self.resource)(parts) {
                Some(resource) => Ok(Some((fence, resource))),
                None => Err(Problem::NoResource),
            },
            None if self.requires(parts) => Err(Problem::Missing),
            None => Ok(None),
        }
    }

    fn requires(&self, parts: &Parts) -> bool {
        match self.require {
            Require::All => true,
            Require::None => false,
            Require::Unsafe => !only_reads(parts),
        }
    }

    /// A request counts as under way from now on: it must before its mark is looked at.
    pub fn enter(&self, fence: Fence, resource: &str) -> std::result::Result<WriteAdmission, Problem> {
        let key = self.marks.key(resource).map_err(|_| Problem::NoResource)?;
        let stale = |seen| stale(fence, seen);
        // A late one is refused at once, and never counts.
        if let Some((_, seen)) = self.marks.known(&key).filter(|(_, seen)| *seen > fence) {
            return Err(stale(seen));
        }
        self.in_flight.enter(key, fence).map_err(stale)
    }

    /// Whether the request may pass, if that is known without the store, as for nearly all requests.
    pub fn passes(&self, admission: &WriteAdmission) -> bool {
        match self.marks.known(admission.resource()) {
            Some((under, seen)) => {
                seen == admission.fence() && admission.raised(self.grace()) && self.marks.still_under(under)
            }
            None => false,
        }
    }

    /// How long clients have to read the responses to requests that are overtaken.
    pub fn grace(&self) -> Duration {
        self.wait / 4
    }

    /// Lets a request through: its mark is raised, and then it waits for those before it.
    pub async fn admit(&self, admission: &WriteAdmission) -> std::result::Result<(), Problem> {
        let (key, fence) = (admission.resource(), admission.fence());
        let mut under = self.raise(key, fence).await?;
        if !admission.raised(self.grace()) {
            if tokio::time::timeout(self.wait, admission.wait_for_older()).await.is_err() {
                return Err(Problem::Waiting);
            }
            // Much may have happened meanwhile.
            under = self.raise(key, fence).await?;
        }
        // Under another grant of the lock, another process may have raised the mark in between.
        if self.marks.still_under(under) { Ok(()) } else { Err(Problem::Unavailable) }
    }

    async fn raise(&self, key: &LockName, fence: Fence) -> std::result::Result<GrantId, Problem> {
        match self.marks.raise(key, fence).await {
            Ok(under) => Ok(under),
            Err(Error::Stale { presented, seen }) => Err(stale(presented, seen)),
            Err(error) => {
                tracing::warn!(%error, "a fence cannot be checked");
                Err(Problem::Unavailable)
            }
        }
    }
}

/// The refusal of a stale fence, which is counted.
fn stale(presented: Fence, seen: Fence) -> Problem {
    stale_counter("http").increment(1);
    Problem::Stale { presented, seen }
}

/// Whether a request changes nothing: its method does not, and no header asks the service to take it for another one.
pub(super) fn only_reads(parts: &Parts) -> bool {
    const OVERRIDES: [&str; 3] = ["x-http-method-override", "x-http-method", "x-method-override"];
    parts.method.is_safe() && !OVERRIDES.iter().any(|name| parts.headers.contains_key(*name))
}
