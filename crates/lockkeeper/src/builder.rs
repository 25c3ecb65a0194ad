//! The request for a lock: [`LockBuilder`], its options, and the retries of a request whose outcome is
//! unknown.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::lease::{LeaseState, LossReason, Terms};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Busy, Error, Grant, Holder, LockRequest, Mode, Names, Owner,
    Purpose, RequestKey, Result, Wait, limits,
};
use lockkeeper_host::{random_128, sleep_until};

use crate::guard::Guard;
use crate::keeper::Lockkeeper;
use crate::metrics::{MetricsPattern, RequestEnd, RequestTimer};

/// The first pause before a request whose outcome is unknown is sent again.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause before a request whose outcome is unknown is sent again.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A call that lasted this long was queued: the store was reachable meanwhile, and an unknown outcome is the first of a new series.
const QUEUED_AFTER: Duration = Duration::from_secs(30);
/// A call that lasted this long, or for a ttl, may have been queued: the stores wait for a reply for 3 s, unless they are configured otherwise.
const MAYBE_QUEUED_AFTER: Duration = Duration::from_secs(5);
/// How often such a call prolongs a series. Without a limit, a store that never replies would keep the caller for ever.
const PROLONGATIONS: u32 = 3;

/// A lock request that is being configured. No call is sent before [`LockBuilder::acquire`] or
/// [`LockBuilder::try_acquire`].
#[must_use = "no lock is requested before acquire() or try_acquire()"]
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
    pattern: Option<Result<MetricsPattern>>,
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
            pattern: None,
        }
    }

    /// How long the store waits for a renewal before it grants the lock to another client: 100 ms to 24 h.
    /// The default of 30 s outlasts a slow store or a busy machine, and is short enough to wait for when a
    /// holder died.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long the request may wait in the queue before [`Error::Busy`]. By default it waits without a
    /// limit.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Wait::For(wait);
        self
    }

    /// Requests a shared hold: other shared holders are admitted, exclusive ones are not.
    pub fn shared(mut self) -> Self {
        self.mode = Mode::Shared;
        self
    }

    /// Requests one of `n` permits. All requests should name the same `n`; if they differ, the smallest
    /// counts.
    pub fn permits(mut self, n: u32) -> Self {
        self.mode = Mode::Permit(n);
        self
    }

    /// Sets the owner of the request. Holds of one owner do not exclude each other and have the same fence,
    /// and owners that wait for each other in a cycle receive [`Error::Deadlock`]. By default every request
    /// is an owner of its own.
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Keeps the lock taken for at least this long after its grant, even if the holder releases it or ends
    /// earlier: a job that takes a second is not run again by a host whose clock is two seconds behind.
    pub fn min_hold(mut self, min: Duration) -> Self {
        self.min_hold = min;
        self
    }

    /// Ends the hold after this long. The guard stops the renewals, so that a stuck holder cannot keep the
    /// lock without a limit.
    pub fn max_hold(mut self, max: Duration) -> Self {
        self.max_hold = Some(max);
        self
    }

    /// Renews only while the holder calls [`Guard::progress`] at least this often. A stuck holder loses the
    /// lock.
    pub fn progress_within(mut self, within: Duration) -> Self {
        self.progress_within = Some(within);
        self
    }

    /// How long the store grants the lock to no one after a hold ended without a release (expiry, a dead
    /// process, a break): the lock-delay. For resources that cannot check a fence: the old holder's last
    /// writes get time to arrive.
    pub fn lock_delay(mut self, delay: Duration) -> Self {
        self.lock_delay = delay;
        self
    }

    /// Declares that doing the work twice would be a waste, and no more. This is the default, and every
    /// store accepts it.
    pub fn for_efficiency(mut self) -> Self {
        self.purpose = Purpose::Efficiency;
        self
    }

    /// Declares that doing the work twice would be harm. A store that can forget a grant or repeat a fence
    /// refuses the request.
    pub fn for_correctness(mut self) -> Self {
        self.purpose = Purpose::Correctness;
        self
    }

    /// The label that `list` and `inspect` show beside the host and the pid. By default the name of the process, as
    /// `ps` shows it.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sends this attempt instead of a new one. A process that stored the attempt and was killed gets the
    /// same grant, with the same fence, if it sends the attempt again within its lease.
    ///
    /// The attempt is the proof of ownership and a secret. Use it for one guard at a time, and never again
    /// in a process that has dropped or released that guard: the release may still be in flight, and would
    /// end the new hold.
    pub fn attempt(mut self, attempt: Attempt) -> Self {
        self.attempt = Some(attempt);
        self
    }

    /// The label `pattern` of the metrics of this request and its guard, instead of the one by the rules of the keeper: see
    /// [`crate::metrics`]. It is a text for many locks, such as `orders/*`. The call that acquires reports a pattern that is
    /// empty, longer than [`PATTERN_BYTES`](crate::metrics::PATTERN_BYTES), or has control characters.
    pub fn metrics_pattern(mut self, pattern: impl AsRef<str>) -> Self {
        self.pattern = Some(MetricsPattern::new(pattern.as_ref()));
        self
    }

    /// Requests the lock, waits in the queue, and returns the guard. [`Error::Busy`] when the wait is over.
    ///
    /// Dropping the future removes the request from the queue and releases what was granted meanwhile.
    pub async fn acquire(self) -> Result<Guard> {
        self.send().await?.map_err(|busy| Error::Busy(Box::new(busy)))
    }

    /// Requests the lock without waiting, whatever [`LockBuilder::wait`] says. `None` means that other
    /// holders or waiters keep it.
    pub async fn try_acquire(mut self) -> Result<Option<Guard>> {
        self.wait = Wait::No;
        Ok(self.send().await?.ok())
    }

    /// The same, and who keeps it.
    pub(crate) async fn acquire_at_once(mut self) -> Result<Result<Guard, Busy>> {
        self.wait = Wait::No;
        self.send().await
    }

    fn check(&self) -> Result<()> {
        let profile = self.keeper.profile();
        profile.allows(self.purpose)?;
        let several = self.names.as_ref().is_ok_and(|names| names.count() > 1);
        let wanted = [
            (self.mode == Mode::Shared, profile.shared, "shared locks"),
            (matches!(self.mode, Mode::Permit(_)), profile.permits, "permits"),
            (several, profile.multi_name, "several names at once"),
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

    async fn send(self) -> Result<Result<Guard, Busy>> {
        self.check()?;
        let inner = self.keeper.0.clone();
        // Check the driver first: a lock that cannot be renewed or released must not be requested.
        inner.driver()?;
        let label = self.label.or_else(|| inner.process_name.clone());
        let holder = Holder::new(inner.host.clone(), std::process::id(), label)?;
        let request = LockRequest {
            key: RequestKey {
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
        request.check()?;
        let terms = Terms {
            ttl: self.ttl,
            max_hold: self.max_hold,
            progress_within: self.progress_within,
            jitter: request.key.attempt.as_bytes()[0],
        };
        let name = request.key.names.first();
        let pattern = self.pattern.transpose()?;
        let mut timer = RequestTimer::start(inner.metrics.of(pattern.as_ref(), name), &self.keeper);
        let mut unconfirmed = UnconfirmedRequest { keeper: &self.keeper, request: &request, open: true };
        let outcome = {
            let look = pin!(timer.look_at_queue(name));
            tokio::select! {
                biased;
                outcome = unconfirmed.send_until_answered() => outcome,
                never = look => never,
            }
        };
        let outcome = outcome.inspect_err(|error| _ = timer.end(error.outcome()))?;
        match outcome {
            AcquireOutcome::Granted(grant) => {
                check_grant(&request, &grant).inspect_err(|error| _ = timer.end(error.outcome()))?;
                let mut guard = Guard::new(self.keeper.clone(), grant, terms, timer.metrics.clone());
                unconfirmed.open = false;
                if let LeaseState::Lost(why) = guard.state() {
                    timer.end(RequestEnd::Unavailable);
                    guard.hold_nothing();
                    return Err(Error::Unavailable(match why {
                        LossReason::Abandoned => format!("{why}: open the store anew"),
                        _ => format!(
                            "the grant came after its own deadline: a ttl of {:?} is too short for this store",
                            request.ttl
                        ),
                    }));
                }
                guard.held_since(timer.end(RequestEnd::Granted));
                Ok(Ok(guard))
            }
            AcquireOutcome::Busy(busy) => {
                unconfirmed.open = false;
                timer.end(RequestEnd::Busy);
                timer.metrics.record_queue(busy.waiting);
                Ok(Err(busy))
            }
        }
    }
}

/// Refuses a grant that does not belong to the request: the store is defective.
fn check_grant(request: &LockRequest, grant: &Grant) -> Result<()> {
    if grant.key == request.key && grant.ttl == request.ttl {
        return Ok(());
    }
    Err(Error::Unknown("the store answered with another grant than the requested one".into()))
}

/// A request whose outcome is not known yet. If it is dropped while it is open, the driver releases it in
/// the background.
struct UnconfirmedRequest<'a> {
    keeper: &'a Lockkeeper,
    request: &'a LockRequest,
    open: bool,
}

impl UnconfirmedRequest<'_> {
    /// Sends the request until the store answers. After an unknown outcome it sends the same attempt again:
    /// that changes nothing if the earlier request was granted, and keeps its position if it is queued. A
    /// retry waits for what is left of the wait. The retries end with the wait; for a request without a
    /// limit, or one that does not wait, they end a ttl after the first unknown outcome, or up to three ttls
    /// later if a request without a limit may have been queued meanwhile. The driver then releases in the
    /// background what may have been granted. Once an outcome is unknown, [`Error::Unavailable`] from a retry
    /// says nothing about the earlier request.
    async fn send_until_answered(&mut self) -> Result<AcquireOutcome> {
        let inner = &self.keeper.0;
        let clock = &*inner.clock;
        let mut request = self.request.clone();
        // A request that does not wait has no deadline of its own.
        let wait_ends = match request.wait {
            Wait::No => BootInstant::NEVER,
            wait => wait.deadline(clock.now()),
        };
        let mut unknown: Option<RetrySeries> = None;
        loop {
            let sent_at = clock.now();
            let error = match inner.store.acquire(&request).await {
                Err(error @ Error::Unknown(_)) => error,
                Err(error @ Error::Unavailable(_)) if unknown.is_some() => error,
                // Every other error means that this request was not carried out. A resumed attempt that was
                // revoked still holds the lock, so the driver releases it.
                Err(error) => {
                    self.open = unknown.is_some() || matches!(error, Error::Lost(_));
                    return Err(error);
                }
                Ok(answer) => return Ok(answer),
            };
            let now = clock.now();
            let lasted = now.since(sent_at);
            if lasted > request.ttl.max(QUEUED_AFTER) {
                unknown = None;
            }
            let unknown = unknown.get_or_insert_with(|| RetrySeries::new(now + request.ttl));
            if let Error::Unknown(why) = error {
                unknown.why = why;
            }
            if matches!(request.wait, Wait::Forever) && lasted > request.ttl.min(MAYBE_QUEUED_AFTER) {
                unknown.prolong(now, request.ttl);
            }
            let give_up = if let Wait::For(_) = request.wait { wait_ends } else { unknown.give_up };
            if now >= give_up {
                return Err(Error::Unknown(std::mem::take(&mut unknown.why)));
            }
            sleep_until(clock, (now + unknown.pause).min(wait_ends)).await;
            unknown.pause = (unknown.pause * 2).min(request.ttl / 10).min(PAUSE_MAX);
            if let Wait::For(_) = request.wait {
                request.wait = Wait::For(wait_ends.since(clock.now()));
            }
        }
    }
}

/// A series of calls for one request whose outcome is unknown.
struct RetrySeries {
    /// When the library stops retrying.
    give_up: BootInstant,
    /// How often the series can still be prolonged.
    prolongations: u32,
    /// The pause before the next retry.
    pause: Duration,
    /// The store's last error.
    why: String,
}

impl RetrySeries {
    fn new(give_up: BootInstant) -> Self {
        RetrySeries { give_up, prolongations: PROLONGATIONS, pause: FIRST_PAUSE, why: String::new() }
    }

    /// Prolongs a series that is over because of a call that may have been queued: the caller would lose its position.
    fn prolong(&mut self, now: BootInstant, ttl: Duration) {
        if now >= self.give_up && self.prolongations > 0 {
            self.prolongations -= 1;
            (self.give_up, self.pause) = (now + ttl, FIRST_PAUSE);
        }
    }
}

impl Drop for UnconfirmedRequest<'_> {
    fn drop(&mut self) {
        if let (true, Ok(driver)) = (self.open, self.keeper.0.driver()) {
            driver.withdraw_later(self.request.key.clone(), self.request.ttl);
        }
    }
}
