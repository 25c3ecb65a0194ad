use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::lease::{State, Terms, Why};
use lockkeeper_core::{
    Acquired, Ask, Attempt, Busy, Claim, Error, Grant, Holder, Mode, Moment, Names, Owner, Purpose, Result,
    Wait, limits,
};
use lockkeeper_host::{random_128, sleep_until};

use crate::guard::Guard;
use crate::keeper::Lockkeeper;

/// The longest pause before a request whose outcome is unknown is sent again.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A call that lasted this long was queued: the store was reachable meanwhile, and an unknown outcome is the first of a new series.
const QUEUED: Duration = Duration::from_secs(30);

/// An ask in the making. Nothing happens before [`LockBuilder::acquire`] or [`LockBuilder::try_acquire`].
#[must_use = "nothing is asked for until acquire() or try_acquire()"]
#[derive(Clone, Debug)]
pub struct LockBuilder {
    keeper: Lockkeeper,
    names: Result<Names>,
    owner: Option<Owner>,
    mode: Mode,
    ttl: Duration,
    wait: Wait,
    lock_delay: Duration,
    min_hold: Duration,
    max_hold: Option<Duration>,
    progress_within: Option<Duration>,
    purpose: Purpose,
    label: Option<String>,
    attempt: Option<Attempt>,
}

impl LockBuilder {
    pub(crate) fn new(keeper: Lockkeeper, names: Result<Names>) -> Self {
        LockBuilder {
            keeper,
            names,
            owner: None,
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(30),
            wait: Wait::Forever,
            lock_delay: Duration::ZERO,
            min_hold: Duration::ZERO,
            max_hold: None,
            progress_within: None,
            purpose: Purpose::Efficiency,
            label: None,
            attempt: None,
        }
    }

    /// How long our silence may last before others get the lock: 100 ms to 24 h. 30 s by default: long enough for a
    /// slow store or a busy machine, short enough to wait for when a holder died.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long to stand in line before [`Error::Busy`]. By default for ever.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Wait::For(wait);
        self
    }

    /// Shares the lock with other shared holders; only exclusive ones are kept out.
    pub fn shared(mut self) -> Self {
        self.mode = Mode::Shared;
        self
    }

    /// One of `n` holders at once. All who ask should name the same number; if not, the smallest counts.
    pub fn permits(mut self, n: u32) -> Self {
        self.mode = Mode::Permit(n);
        self
    }

    /// Asks in the name of `owner`: other locks of the same owner do not exclude this one, the fence stays the same,
    /// and owners that wait for each other in a circle are told [`Error::Deadlock`]. By default every ask is its own.
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Keeps the lock taken for at least this long from its grant on, even if it is released or its process ends
    /// cleanly before: a job that takes a second is not run again by a host whose clock is two seconds behind.
    pub fn min_hold(mut self, min: Duration) -> Self {
        self.min_hold = min;
        self
    }

    /// Lets go of the lock after this long, even if its holder is stuck and would be renewed for ever.
    pub fn max_hold(mut self, max: Duration) -> Self {
        self.max_hold = Some(max);
        self
    }

    /// Renews only while [`Guard::progress`] is called at least this often: a stuck holder loses the lock.
    pub fn progress_within(mut self, within: Duration) -> Self {
        self.progress_within = Some(within);
        self
    }

    /// Holds the lock back for this long after an unclean end (expiry, a dead process, a break), for resources that
    /// cannot check a fence: the old holder's last writes get time to arrive.
    pub fn lock_delay(mut self, delay: Duration) -> Self {
        self.lock_delay = delay;
        self
    }

    /// Doing it twice would be a waste, no more. This is the default, and any store will do.
    pub fn for_efficiency(mut self) -> Self {
        self.purpose = Purpose::Efficiency;
        self
    }

    /// Doing it twice would be harm: a store that can forget a grant or let a fence go back is refused.
    pub fn for_correctness(mut self) -> Self {
        self.purpose = Purpose::Correctness;
        self
    }

    /// What people see in lists beside the host and the pid.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Asks with this attempt instead of a new one: a process that wrote it down and was killed gets the same grant with the
    /// same fence when it starts again within its lease.
    ///
    /// It is the proof of ownership and a secret. Use it for one guard at a time, and never again in a process that has
    /// dropped or released that guard: the release may still be under way, and would end the new one.
    pub fn attempt(mut self, attempt: Attempt) -> Self {
        self.attempt = Some(attempt);
        self
    }

    /// Asks, stands in line, and returns the guard. [`Error::Busy`] when the wait is over.
    ///
    /// Dropping the future leaves the line, and gives back what was granted meanwhile.
    pub async fn acquire(self) -> Result<Guard> {
        self.ask().await?.map_err(|busy| Error::Busy(Box::new(busy)))
    }

    /// Asks without waiting, whatever [`LockBuilder::wait`] says. `None`: someone else has it.
    pub async fn try_acquire(mut self) -> Result<Option<Guard>> {
        self.wait = Wait::No;
        Ok(self.ask().await?.ok())
    }

    fn check(&self) -> Result<()> {
        let profile = self.keeper.profile();
        profile.allows(self.purpose)?;
        let several = self.names.as_ref().is_ok_and(|names| names.count() > 1);
        let wanted = [
            (self.mode == Mode::Shared, profile.shared, "shared locks"),
            (matches!(self.mode, Mode::Permit(_)), profile.permits, "permits"),
            (several, profile.several, "several names at once"),
            (self.owner.is_some(), profile.reentry, "re-entry by an owner"),
            (!self.lock_delay.is_zero(), profile.lock_delay, "a lock delay"),
            (!self.min_hold.is_zero(), profile.min_hold, "a minimum hold"),
        ];
        if let Some((_, _, what)) = wanted.iter().find(|(wanted, has, _)| *wanted && !has) {
            return Err(Error::Unsupported(format!("the {} store has no {what}", profile.store)));
        }
        for (what, given) in [("max hold", self.max_hold), ("progress interval", self.progress_within)] {
            if given.is_some_and(|d| d < limits::TTL_MIN) {
                return Err(Error::invalid(format!(
                    "the {what} is {:?}: at least 100ms are needed",
                    given.unwrap()
                )));
            }
        }
        if let (Some(max), min) = (self.max_hold, self.min_hold)
            && max < min
        {
            return Err(Error::invalid(format!(
                "the max hold of {max:?} is shorter than the min hold of {min:?}"
            )));
        }
        Ok(())
    }

    async fn ask(self) -> Result<Result<Guard, Busy>> {
        self.check()?;
        let inner = self.keeper.0.clone();
        // Before anything is asked for: what cannot be renewed or given back is not wanted.
        inner.driver()?;
        let holder = Holder::new(inner.host.clone(), std::process::id(), self.label)?;
        let ask = Ask {
            claim: Claim {
                attempt: self.attempt.unwrap_or_else(|| Attempt::from_bytes(random_128())),
                names: self.names?,
            },
            owner: self.owner,
            mode: self.mode,
            ttl: self.ttl,
            wait: self.wait,
            lock_delay: self.lock_delay,
            min_hold: self.min_hold,
            holder: Arc::new(holder),
        };
        ask.check()?;
        let terms = Terms {
            ttl: self.ttl,
            max_hold: self.max_hold,
            progress_within: self.progress_within,
            jitter: ask.claim.attempt.as_bytes()[0],
        };
        let mut pending = Pending { keeper: &self.keeper, ask: &ask, open: true };
        match pending.answer().await? {
            Acquired::Granted(grant) => {
                check_grant(&ask, &grant)?;
                let guard = Guard::new(self.keeper.clone(), grant, terms);
                pending.open = false;
                if let State::Lost(why) = guard.state() {
                    return Err(Error::Unavailable(match why {
                        Why::Abandoned => format!("{why}: open the store anew"),
                        _ => format!(
                            "the grant came after its own deadline: a ttl of {:?} is too short for this store",
                            ask.ttl
                        ),
                    }));
                }
                Ok(Ok(guard))
            }
            Acquired::Busy(busy) => {
                pending.open = false;
                Ok(Err(busy))
            }
        }
    }
}

/// A store that answers with somebody else's grant has lost its mind: do not act on it.
fn check_grant(ask: &Ask, grant: &Grant) -> Result<()> {
    if grant.claim == ask.claim && grant.ttl == ask.ttl {
        return Ok(());
    }
    Err(Error::Unknown("the store answered with another grant than the one asked for".into()))
}

/// An ask whose outcome is not known yet. Dropped while it is open, it is taken back in the background.
struct Pending<'a> {
    keeper: &'a Lockkeeper,
    ask: &'a Ask,
    open: bool,
}

impl Pending<'_> {
    /// The store's answer. After an unknown outcome the same attempt is sent again: that changes nothing if the earlier request was
    /// granted, and keeps its position if the request is queued. A retry waits for what is left of the wait. The retries end with
    /// the wait, or a ttl after the first unknown outcome; the driver then releases in the background what may have been granted.
    /// Once an outcome is unknown, a store that is unreachable says nothing about the earlier request.
    async fn answer(&mut self) -> Result<Acquired> {
        let inner = &self.keeper.0;
        let clock = &*inner.clock;
        let mut ask = self.ask.clone();
        // A request that does not wait has no wait that could end.
        let wait_ends = match ask.wait {
            Wait::No => Moment::NEVER,
            wait => wait.deadline(clock.now()),
        };
        let mut unknown: Option<Unknown> = None;
        loop {
            let sent_at = clock.now();
            let error = match inner.store.acquire(&ask).await {
                Err(error @ Error::Unknown(_)) => error,
                Err(error @ Error::Unavailable(_)) if unknown.is_some() => error,
                // Every other error means that this request did not happen. A resumed attempt that is revoked still holds: it is given back.
                Err(error) => {
                    self.open = unknown.is_some() || matches!(error, Error::Lost(_));
                    return Err(error);
                }
                Ok(answer) => return Ok(answer),
            };
            let now = clock.now();
            if now.since(sent_at) > ask.ttl.max(QUEUED) {
                unknown = None;
            }
            let unknown = unknown.get_or_insert_with(|| Unknown::new(now + ask.ttl));
            if let Error::Unknown(why) = error {
                unknown.why = why;
            }
            if now >= wait_ends.min(unknown.give_up) {
                return Err(Error::Unknown(std::mem::take(&mut unknown.why)));
            }
            sleep_until(clock, (now + unknown.pause).min(wait_ends)).await;
            unknown.pause = (unknown.pause * 2).min(ask.ttl / 10).min(PAUSE_MAX);
            if let Wait::For(_) = ask.wait {
                ask.wait = Wait::For(wait_ends.since(clock.now()));
            }
        }
    }
}

/// A series of calls for one request whose outcome is unknown.
struct Unknown {
    /// When the library stops to ask again.
    give_up: Moment,
    /// How long it pauses before it asks again.
    pause: Duration,
    /// What the store said last.
    why: String,
}

impl Unknown {
    fn new(give_up: Moment) -> Self {
        Unknown { give_up, pause: Duration::from_millis(10), why: String::new() }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let (true, Ok(driver)) = (self.open, self.keeper.0.driver()) {
            driver.withdraw_later(self.ask.claim.clone(), self.ask.ttl);
        }
    }
}
