//! A held lock: [`Guard`], and the lease state that a guard shares with the thread that renews it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockkeeper_core::lease::{Lease, LeaseState, LossReason, Terms};
use lockkeeper_core::{BootInstant, Error, Fence, Grant, Mode, Names, ReleaseOutcome, Result};
use lockkeeper_host::sleep_until;
use tokio::sync::watch;

use crate::keeper::Lockkeeper;
use crate::metrics::PatternMetrics;

/// The state of one lease. The driver's thread writes it, the guard reads it.
#[derive(Debug)]
pub(crate) struct GuardState {
    snapshot: watch::Sender<LeaseSnapshot>,
    pub metrics: Arc<PatternMetrics>,
    /// Whether the end of the guard is counted, as a loss or otherwise.
    counted: AtomicBool,
}

/// The lease of a lock at one moment.
#[derive(Clone, Debug)]
struct LeaseSnapshot {
    /// The state that the driver reported last. A deadline that has passed since overrides it.
    state: LeaseState,
    deadline: BootInstant,
    /// The reason for which the lock is lost at the deadline.
    at_deadline: LossReason,
}

impl GuardState {
    fn new(lease: &Lease, metrics: Arc<PatternMetrics>) -> Self {
        let (deadline, at_deadline) = (lease.deadline(), lease.why_at_deadline());
        let snapshot = LeaseSnapshot { state: LeaseState::Valid, deadline, at_deadline };
        GuardState { snapshot: watch::Sender::new(snapshot), metrics, counted: AtomicBool::new(false) }
    }

    pub fn set_deadline(&self, lease: &Lease) {
        self.snapshot.send_if_modified(|now| {
            (now.deadline, now.at_deadline) = (lease.deadline(), lease.why_at_deadline());
            // Readers compare the clock with the deadline themselves, so they need no notification.
            false
        });
    }

    pub fn set_state(&self, state: LeaseState) {
        // A lease that is lost stays lost: a late renewal must not revive it.
        self.snapshot.send_if_modified(|now| {
            let changed = now.state != state && !matches!(now.state, LeaseState::Lost(_));
            if changed {
                now.state = state;
            }
            changed
        });
    }

    /// Reports a state that the lease has come to, and counts it if it is a loss.
    pub fn report(&self, state: LeaseState) {
        let loss = if let LeaseState::Lost(why) = &state { Some(why.clone()) } else { None };
        self.set_state(state);
        self.count_loss(loss.as_ref());
    }

    /// Counts a loss, once: the driver may see it first, or the guard.
    fn count_loss(&self, loss: Option<&LossReason>) {
        if let Some(why) = loss
            && !self.counted.swap(true, Ordering::Relaxed)
        {
            self.metrics.count_loss(why);
        }
    }

    fn snapshot(&self) -> LeaseSnapshot {
        self.snapshot.borrow().clone()
    }
}

/// A held lock, for as long as [`Guard::is_held`] returns true.
///
/// Dropping a guard ends the hold at once; the driver sends the release in the background, and the ttl ends
/// the lock if that fails. To know that the lock was released, call [`Guard::release`].
///
/// A guard belongs to the process that acquired it. In a fork of that process it is lost, and dropping it
/// there releases nothing.
#[must_use = "a guard that is dropped releases its lock"]
pub struct Guard {
    keeper: Lockkeeper,
    grant: Grant,
    shared: Arc<GuardState>,
    first_deadline: BootInstant,
    id: u64,
    released: bool,
    hold: HoldTime,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = &self.grant.key.names;
        write!(f, "Guard({names:?}, fence {}, {:?})", self.grant.fence, self.state())
    }
}

impl Guard {
    pub(crate) fn new(keeper: Lockkeeper, grant: Grant, terms: Terms, metrics: Arc<PatternMetrics>) -> Self {
        let lease = Lease::new(grant.sent_at, grant.lease, terms);
        let first_deadline = lease.deadline();
        let shared = Arc::new(GuardState::new(&lease, metrics));
        let id = match keeper.0.driver() {
            Ok(driver) => driver.add(grant.clone(), lease, shared.clone()),
            Err(_) => {
                shared.report(LeaseState::Lost(LossReason::Abandoned));
                0
            }
        };
        Guard { keeper, grant, shared, first_deadline, id, released: false, hold: HoldTime::NotRecorded }
    }

    /// The moment from which the metrics count the hold.
    pub(crate) fn held_since(&mut self, granted: BootInstant) {
        self.hold = HoldTime::Since(granted);
    }

    /// Records no hold and no loss: the grant came too late for its holder.
    pub(crate) fn hold_nothing(&self) {
        self.shared.counted.store(true, Ordering::Relaxed);
    }

    /// Measures the end of the hold, and counts it if it is a loss. Call it before the driver forgets the guard. Returns whether the
    /// lock was held until now.
    fn end_hold(&mut self) -> bool {
        // In a fork the recorder is that of the parent, and a thread of the parent may have had its lock.
        let HoldTime::Since(since) = self.hold else { return false };
        if self.keeper.0.forked() {
            self.hold = HoldTime::NotRecorded;
            return false;
        }
        let snapshot = self.shared.snapshot();
        let now = self.keeper.0.clock.now();
        self.hold = HoldTime::Ended(now.min(snapshot.deadline).since(since));
        let loss = match snapshot.state {
            LeaseState::Lost(why) => Some(why),
            _ => (now >= snapshot.deadline).then_some(snapshot.at_deadline),
        };
        self.shared.count_loss(loss.as_ref());
        // The driver may come to the deadline before it reads that the guard is gone: that is no loss.
        self.shared.counted.store(true, Ordering::Relaxed);
        loss.is_none()
    }

    /// The fence (the fencing token): the number to send with every write. It stays the same for as long as
    /// the lock is held.
    pub fn fence(&self) -> Fence {
        self.grant.fence
    }

    /// The mode of the hold.
    pub fn mode(&self) -> Mode {
        self.grant.mode
    }

    /// The held names, sorted.
    pub fn names(&self) -> &Names {
        &self.grant.key.names
    }

    /// The ttl: how long the store waits for a renewal before it grants the lock to another client.
    pub fn ttl(&self) -> Duration {
        self.grant.ttl
    }

    /// The length of the current lease. It is the ttl after the first renewal; before it the lease may be
    /// much shorter, because a store may grant a waiter a short first lease.
    pub fn lease(&self) -> Duration {
        if self.deadline() == self.first_deadline { self.grant.lease } else { self.grant.ttl }
    }

    /// The state of the lease now: a comparison with the deadline, without IO. It is right even in the
    /// first instruction after the process was stopped for a minute, and whatever happened to the driver's
    /// thread.
    pub fn state(&self) -> LeaseState {
        // Check for a fork first: the child has none of the threads that write the shared state.
        if self.keeper.0.forked() {
            return LeaseState::Lost(LossReason::Forked);
        }
        let snapshot = self.shared.snapshot();
        match snapshot.state {
            LeaseState::Lost(why) => LeaseState::Lost(why),
            _ if self.keeper.0.clock.now() >= snapshot.deadline => LeaseState::Lost(snapshot.at_deadline),
            state => state,
        }
    }

    /// Why the lock is lost. While it is held: why it will be lost at the deadline if the store does not
    /// answer until then.
    pub fn loss_reason(&self) -> LossReason {
        match self.state() {
            LeaseState::Lost(why) => why,
            _ => self.shared.snapshot().at_deadline,
        }
    }

    /// Whether the lock is held now. The answer is true when the call returns; only a check of the fence
    /// makes it true when a write arrives.
    pub fn is_held(&self) -> bool {
        !matches!(self.state(), LeaseState::Lost(_))
    }

    /// The moment at which the holder must have stopped. Each renewal moves it on.
    pub fn deadline(&self) -> BootInstant {
        self.shared.snapshot().deadline
    }

    /// The time until the deadline; zero if the lock is lost.
    pub fn remaining(&self) -> Duration {
        if self.is_held() { self.deadline().since(self.keeper.0.clock.now()) } else { Duration::ZERO }
    }

    /// Reports that the work makes progress. It matters only with [`crate::LockBuilder::progress_within`].
    pub fn progress(&self) {
        if let Ok(driver) = self.keeper.0.driver() {
            driver.progress(self.id);
        }
    }

    /// A handle that ends this hold from another task.
    pub(crate) fn revoker(&self) -> GuardRevoker {
        GuardRevoker { keeper: self.keeper.clone(), shared: self.shared.clone(), id: self.id }
    }

    /// Completes when the lock is lost, with the reason as [`Error::Lost`], and at the deadline at the
    /// latest, whatever the store does. The holder must stop then, and not hurry to finish.
    pub async fn lost(&self) -> Error {
        if let LeaseState::Lost(why) = self.state() {
            return Error::Lost(why.to_string());
        }
        let mut changes = self.shared.snapshot.subscribe();
        loop {
            if let LeaseState::Lost(why) = self.state() {
                return Error::Lost(why.to_string());
            }
            // Wait for the deadline here too: a driver that hangs reports nothing.
            tokio::select! {
                _ = changes.changed() => {}
                () = sleep_until(&*self.keeper.0.clock, self.deadline()) => {}
            }
        }
    }

    /// Completes when less than `lead` is left until the deadline, or when the lock is lost: the moment to
    /// stop work that must not run on.
    ///
    /// A first [lease](Guard::lease) may be shorter than `lead`. Until the first renewal the lead is at
    /// most a quarter of that lease.
    pub async fn nearly_lost(&self, lead: Duration) {
        while self.is_held() {
            let lead = if self.lease() < self.grant.ttl { lead.min(self.lease() / 4) } else { lead };
            let at = self.deadline().before(lead);
            let clock = &self.keeper.0.clock;
            if clock.now() >= at {
                return;
            }
            tokio::select! {
                _ = self.lost() => return,
                () = sleep_until(&**clock, at) => {} // A renewal may have moved the deadline: check again.
            }
        }
    }

    /// Runs `work` for as long as the lock is held. If the lock is about to be lost, `run` drops `work` a
    /// twentieth of the ttl *before* the deadline and returns [`Error::Lost`]. Work that blocks its thread
    /// cannot be dropped in time: if it ends after the lock was lost, `run` drops its output and returns
    /// [`Error::Lost`] as well.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            () = self.nearly_lost(self.grant.ttl / 20) => Err(match self.state() {
                LeaseState::Lost(why) => Error::Lost(why.to_string()),
                _ => Error::Lost(format!("{}; the work was dropped before the deadline", self.loss_reason())),
            }),
            done = work => match self.state() {
                LeaseState::Lost(why) => Err(Error::Lost(why.to_string())),
                _ => Ok(done),
            },
        }
    }

    /// Runs `work` that can fail, for as long as the lock is held: [`Guard::run`] with one error instead of two.
    ///
    /// The error is the work's own, or [`Error::Lost`] as in [`Guard::run`], converted by `From`. So the work's error type is
    /// [`Error`], `anyhow::Error`, `Box<dyn std::error::Error>`, or a type of yours that has `From<lockkeeper::Error>`. For any
    /// other type use [`Guard::run`], which keeps the two apart.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
    /// # async fn settle(_: lockkeeper::Fence) -> Result<u64, Box<dyn std::error::Error>> { Ok(42) }
    /// let guard = keeper.lock("nightly").acquire().await?;
    /// let settled = guard.try_run(settle(guard.fence())).await?;      // guard.run(…).await??
    /// # assert_eq!(settled, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of `work`. [`Error::Lost`] if the lock was lost before `work` ended; the output of `work`,
    /// an error too, is dropped then.
    pub async fn try_run<T, E, F>(&self, work: F) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        self.run(work).await?
    }

    /// Releases the lock and returns the store's answer: [`ReleaseOutcome::AlreadyGone`] means that the
    /// lock had been lost before.
    ///
    /// The hold ends with the call. If the store is unreachable, `release` returns the error and the driver
    /// retries the release in the background until the ttl ends; likewise if the future is dropped.
    pub async fn release(mut self) -> Result<ReleaseOutcome> {
        if self.keeper.0.forked() {
            return Err(Error::Lost(LossReason::Forked.to_string()));
        }
        let was_held = self.end_hold();
        // First end the hold here, then release it in the store.
        if let Ok(driver) = self.keeper.0.driver() {
            driver.remove(self.id);
        }
        let answer = self.keeper.0.store.release(&self.grant.key).await;
        self.released = answer.is_ok();
        if let (Ok(ReleaseOutcome::AlreadyGone), true) = (&answer, was_held) {
            self.shared.metrics.count_already_gone();
        }
        answer
    }

    /// Ends the hold without a release: the driver renews the lock no more, and the store grants it to no other client before the lease ends.
    /// For a holder that could not stop all of its work: the next holder must not begin beside it.
    ///
    /// The `sqlite:` store frees the locks of a process that has ended, so there the process has to stay until then.
    pub fn let_expire(mut self) {
        self.end_hold();
        if let Ok(driver) = self.keeper.0.driver() {
            driver.remove(self.id);
        }
        // Dropping it releases nothing.
        self.released = true;
    }
}

/// The time for which a lock was held, for the metrics: it is recorded when the guard is dropped.
#[derive(Clone, Copy)]
enum HoldTime {
    /// The holder never had the grant, or is a fork.
    NotRecorded,
    Since(BootInstant),
    Ended(Duration),
}

/// The means to end a hold whose guard belongs to another task. The lock itself stays taken until that task drops the guard, or until
/// the lease ends: the driver renews it no more.
#[derive(Clone)]
pub(crate) struct GuardRevoker {
    keeper: Lockkeeper,
    shared: Arc<GuardState>,
    id: u64,
}

impl GuardRevoker {
    /// Marks the guard as lost, and stops its renewals.
    pub fn end(&self, why: LossReason) {
        self.shared.report(LeaseState::Lost(why));
        if let Ok(driver) = self.keeper.0.driver() {
            driver.remove(self.id);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.end_hold();
        // A fork has no driver, and the lock belongs to the parent process.
        if let (false, Ok(driver)) = (self.released, self.keeper.0.driver()) {
            driver.remove(self.id);
            driver.release_later(self.grant.key.clone(), self.grant.ttl);
        }
        // A recorder is code of the user's: nothing that a lock depends on comes after it.
        if let HoldTime::Ended(held) = self.hold {
            self.shared.metrics.record_hold(held);
        }
    }
}
