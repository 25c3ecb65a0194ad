use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::lease::{Lease, State, Terms, Why};
use lockkeeper_core::{Error, Fence, Grant, Mode, Moment, Names, Release, Result};
use lockkeeper_host::sleep_until;
use tokio::sync::watch;

use crate::keeper::Lockkeeper;

/// What the guard and the thread that renews it both see.
#[derive(Debug)]
pub(crate) struct Pulse(watch::Sender<Belief>);

/// What may be believed of a lock.
#[derive(Clone, Debug)]
struct Belief {
    /// As the driver last reported it. A deadline that has passed since counts for more.
    state: State,
    deadline: Moment,
    /// The reason for which the lock is lost at the deadline.
    at_deadline: Why,
}

impl Pulse {
    fn new(lease: &Lease) -> Self {
        let (deadline, at_deadline) = (lease.deadline(), lease.why_at_deadline());
        Pulse(watch::Sender::new(Belief { state: State::Valid, deadline, at_deadline }))
    }

    pub fn set(&self, lease: &Lease) {
        self.0.send_if_modified(|now| {
            (now.deadline, now.at_deadline) = (lease.deadline(), lease.why_at_deadline());
            // Readers look at the clock and at the deadline themselves.
            false
        });
    }

    pub fn tell(&self, state: State) {
        // Once lost, always lost.
        self.0.send_if_modified(|now| {
            let news = now.state != state && !matches!(now.state, State::Lost(_));
            if news {
                now.state = state;
            }
            news
        });
    }

    fn belief(&self) -> Belief {
        self.0.borrow().clone()
    }
}

/// A lock that is held, for as long as [`Guard::is_held`] says so.
///
/// Dropping it ends it at once; the release is sent in the background, and the ttl is the last resort. To know that it
/// was released, call [`Guard::release`].
///
/// It belongs to the process that acquired it. In a fork of that process it is lost, and dropping it there releases nothing.
#[must_use = "a guard that is dropped releases its lock"]
pub struct Guard {
    keeper: Lockkeeper,
    grant: Grant,
    pulse: Arc<Pulse>,
    first_deadline: Moment,
    id: u64,
    released: bool,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = &self.grant.claim.names;
        write!(f, "Guard({names:?}, fence {}, {:?})", self.grant.fence, self.state())
    }
}

impl Guard {
    pub(crate) fn new(keeper: Lockkeeper, grant: Grant, terms: Terms) -> Self {
        let lease = Lease::new(grant.sent_at, grant.lease, terms);
        let first_deadline = lease.deadline();
        let pulse = Arc::new(Pulse::new(&lease));
        let id = match keeper.0.driver() {
            Ok(driver) => driver.add(grant.clone(), lease, pulse.clone()),
            Err(_) => {
                pulse.tell(State::Lost(Why::Abandoned));
                0
            }
        };
        Guard { keeper, grant, pulse, first_deadline, id, released: false }
    }

    /// The number to send along with every write. It stays the same for as long as the lock is held.
    pub fn fence(&self) -> Fence {
        self.grant.fence
    }

    /// How it is held.
    pub fn mode(&self) -> Mode {
        self.grant.mode
    }

    /// The names that are held, sorted.
    pub fn names(&self) -> &Names {
        &self.grant.claim.names
    }

    /// How long our silence may last.
    pub fn ttl(&self) -> Duration {
        self.grant.ttl
    }

    /// How long the lease that runs now is, as a whole: the ttl, but until the first renewal perhaps much less. A store may let a
    /// waiter in with a short lease.
    pub fn lease(&self) -> Duration {
        if self.deadline() == self.first_deadline { self.grant.lease } else { self.grant.ttl }
    }

    /// What may be believed now: a comparison with the deadline, no IO. Right even in the first instruction after the
    /// process was stopped for a minute, and whatever has become of the thread that renews.
    pub fn state(&self) -> State {
        // Before anything that is shared with threads, which a fork does not have.
        if self.keeper.0.forked() {
            return State::Lost(Why::Forked);
        }
        let belief = self.pulse.belief();
        match belief.state {
            State::Lost(why) => State::Lost(why),
            _ if self.keeper.0.clock.now() >= belief.deadline => State::Lost(belief.at_deadline),
            state => state,
        }
    }

    /// Why the lock is lost. While it is held: why it will be at the deadline, if nothing is heard from the store until then.
    pub fn loss_reason(&self) -> Why {
        match self.state() {
            State::Lost(why) => why,
            _ => self.pulse.belief().at_deadline,
        }
    }

    /// Whether the lock is held now. A *yes* is true when it is said; only a fence makes it true when a write arrives.
    pub fn is_held(&self) -> bool {
        !matches!(self.state(), State::Lost(_))
    }

    /// Until when the lock may be believed held, as things stand. Renewals move it on.
    pub fn deadline(&self) -> Moment {
        self.pulse.belief().deadline
    }

    /// How long it is until the deadline; zero if the lock is lost.
    pub fn remaining(&self) -> Duration {
        if self.is_held() { self.deadline().since(self.keeper.0.clock.now()) } else { Duration::ZERO }
    }

    /// Shows that the work gets on. Only of interest with [`crate::LockBuilder::progress_within`].
    pub fn progress(&self) {
        if let Ok(driver) = self.keeper.0.driver() {
            driver.progress(self.id);
        }
    }

    /// Ends when the lock is lost, with the reason as [`Error::Lost`]; at the deadline at the latest, whatever the store
    /// is doing. Stop then; do not hurry to finish.
    pub async fn lost(&self) -> Error {
        if let State::Lost(why) = self.state() {
            return Error::Lost(why.to_string());
        }
        let mut news = self.pulse.0.subscribe();
        loop {
            if let State::Lost(why) = self.state() {
                return Error::Lost(why.to_string());
            }
            // The clock is asked here too: a driver that hangs tells nobody.
            tokio::select! {
                _ = news.changed() => {}
                () = sleep_until(&*self.keeper.0.clock, self.deadline()) => {}
            }
        }
    }

    /// Ends when less than `lead` is left until the deadline, or the lock is lost: time to stop what must not run on.
    ///
    /// A first [lease](Guard::lease) may be shorter than `lead`: until the first renewal a quarter of it is the most that is kept
    /// as a lead.
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
                () = sleep_until(&**clock, at) => {} // A renewal may have moved the deadline meanwhile: look again.
            }
        }
    }

    /// Runs `work` for as long as the lock is held. If it is about to be lost, `work` is dropped a twentieth of the ttl
    /// *before* the deadline, and the answer is [`Error::Lost`]. Work that blocks its thread cannot be dropped in time: if it ends after
    /// the lock was lost, the answer is [`Error::Lost`] as well, and its output is dropped.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            () = self.nearly_lost(self.grant.ttl / 20) => Err(match self.state() {
                State::Lost(why) => Error::Lost(why.to_string()),
                _ => Error::Lost(format!("{}; the work was ended before the deadline", self.loss_reason())),
            }),
            done = work => match self.state() {
                State::Lost(why) => Err(Error::Lost(why.to_string())),
                _ => Ok(done),
            },
        }
    }

    /// Gives the lock back and says what the store says: [`Release::AlreadyGone`] means that it had been lost before.
    ///
    /// From the call on the lock counts as given back. If the store cannot be reached the error says so, and the
    /// release is tried again in the background until the ttl is over; the same if the future is dropped.
    pub async fn release(mut self) -> Result<Release> {
        if self.keeper.0.forked() {
            return Err(Error::Lost(Why::Forked.to_string()));
        }
        // First stop believing, then tell the store.
        if let Ok(driver) = self.keeper.0.driver() {
            driver.remove(self.id);
        }
        let answer = self.keeper.0.store.release(&self.grant.claim).await;
        self.released = answer.is_ok();
        answer
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // In a fork there is no driver, and the lock is the parent's.
        if let (false, Ok(driver)) = (self.released, self.keeper.0.driver()) {
            driver.remove(self.id);
            driver.release_later(self.grant.claim.clone(), self.grant.ttl);
        }
    }
}
