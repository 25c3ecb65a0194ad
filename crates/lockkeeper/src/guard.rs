use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::lease::{Lease, State, Terms, Why};
use lockkeeper_core::{Error, Fence, Grant, Mode, Moment, Names, Release, Result};
use lockkeeper_host::sleep_until;
use tokio::sync::watch;

use crate::keeper::Lockkeeper;

/// What the guard and the thread that renews it both see.
#[derive(Debug)]
pub(crate) struct Pulse {
    deadline: AtomicU64,
    state: watch::Sender<State>,
}

impl Pulse {
    pub fn set(&self, lease: &Lease) {
        self.deadline.store(lease.deadline().as_nanos(), Ordering::Release);
    }

    pub fn tell(&self, state: State) {
        // Once lost, always lost.
        self.state.send_if_modified(|now| {
            let news = *now != state && !matches!(now, State::Lost(_));
            if news {
                *now = state;
            }
            news
        });
    }

    fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }
}

/// A lock that is held, for as long as [`Guard::is_held`] says so.
///
/// Dropping it ends it at once; the release is sent in the background, and the ttl is the last resort. To know that it
/// was released, call [`Guard::release`].
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
        let deadline = AtomicU64::new(first_deadline.as_nanos());
        let pulse = Arc::new(Pulse { deadline, state: watch::Sender::new(State::Valid) });
        let id = keeper.0.driver().add(grant.clone(), lease, pulse.clone());
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
    /// process was stopped for a minute.
    pub fn state(&self) -> State {
        let now = self.keeper.0.clock.now();
        match *self.pulse.state.borrow() {
            State::Lost(why) => State::Lost(why),
            _ if now >= self.pulse.deadline() => State::Lost(Why::Silence),
            state => state,
        }
    }

    /// Whether the lock is held now. A *yes* is true when it is said; only a fence makes it true when a write arrives.
    pub fn is_held(&self) -> bool {
        !matches!(self.state(), State::Lost(_))
    }

    /// Until when the lock may be believed held, as things stand. Renewals move it on.
    pub fn deadline(&self) -> Moment {
        self.pulse.deadline()
    }

    /// How long it is until the deadline; zero if the lock is lost.
    pub fn remaining(&self) -> Duration {
        if self.is_held() { self.deadline().since(self.keeper.0.clock.now()) } else { Duration::ZERO }
    }

    /// Shows that the work gets on. Only of interest with [`crate::LockBuilder::progress_within`].
    pub fn progress(&self) {
        self.keeper.0.driver().progress(self.id);
    }

    /// Ends when the lock is lost, with the reason as [`Error::Lost`]; at the deadline at the latest, whatever the store
    /// is doing. Stop then; do not hurry to finish.
    pub async fn lost(&self) -> Error {
        let mut state = self.pulse.state.subscribe();
        let lost = state.wait_for(|state| matches!(state, State::Lost(_)));
        match lost.await.as_deref() {
            Ok(State::Lost(why)) => Error::Lost(why.to_string()),
            _ => Error::Lost(Why::Abandoned.to_string()),
        }
    }

    /// Ends when less than `lead` is left until the deadline, or the lock is lost: time to stop what must not run on.
    ///
    /// A first [lease](Guard::lease) may be shorter than `lead`: until the first renewal a quarter of it is the most that is kept
    /// as a lead.
    pub async fn nearly_lost(&self, lead: Duration) {
        loop {
            let lead = if self.lease() < self.grant.ttl { lead.min(self.lease() / 4) } else { lead };
            let at = self.deadline().before(lead);
            let clock = &self.keeper.0.clock;
            if clock.now() >= at || !self.is_held() {
                return;
            }
            tokio::select! {
                _ = self.lost() => return,
                () = sleep_until(&**clock, at) => {} // A renewal may have moved the deadline meanwhile: look again.
            }
        }
    }

    /// Runs `work` for as long as the lock is held. If it is about to be lost, `work` is dropped a twentieth of the ttl
    /// *before* the deadline, and the answer is [`Error::Lost`]. Work that blocks its thread cannot be dropped in time.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            () = self.nearly_lost(self.grant.ttl / 20) => Err(match self.state() {
                State::Lost(why) => Error::Lost(why.to_string()),
                _ => Error::Lost("it could not be renewed, and the work was ended before the deadline".into()),
            }),
            done = work => Ok(done),
        }
    }

    /// Gives the lock back and says what the store says: [`Release::AlreadyGone`] means that it had been lost before.
    ///
    /// From the call on the lock counts as given back. If the store cannot be reached the error says so, and the
    /// release is tried again in the background until the ttl is over; the same if the future is dropped.
    pub async fn release(mut self) -> Result<Release> {
        // First stop believing, then tell the store.
        self.keeper.0.driver().remove(self.id);
        let answer = self.keeper.0.store.release(&self.grant.claim).await;
        self.released = answer.is_ok();
        answer
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.released {
            let driver = self.keeper.0.driver();
            driver.remove(self.id);
            driver.release_later(self.grant.claim.clone(), self.grant.ttl);
        }
    }
}
