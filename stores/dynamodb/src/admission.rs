//! The decision on one try to acquire: the rule of admission over the working copies, and the changes that follow from it.

use std::time::Duration;

use lockkeeper_core::admission::{Admission, evaluate, evaluate_all};
use lockkeeper_core::{BootInstant, Busy, Error, Fence, LockRequest, LockView, Mode, Result};

use crate::break_lock::refuse_revoked;
use crate::cas::{CasDecision, LockTable, WorkingCopy, after};
use crate::codec::{ExclusiveIntent, StoredHold, millis, millis_up};
use crate::keys::owner_hash;
use crate::observation::HoldPhase;
use crate::own_leases::OwnLeases;

/// The request, and the state that all tries of one call of `acquire` share.
pub struct AcquireTry<'a> {
    pub request: &'a LockRequest,
    pub attempt_hash: String,
    /// When the wait ends.
    pub until: BootInstant,
    /// The first try was blocked, and the caller waits.
    pub waits: bool,
}

/// The outcome of one try.
pub enum TryOutcome {
    Granted {
        fence: Fence,
        mode: Mode,
        ttl: Duration,
    },
    /// The holders, and how long the first of their leases lasts without a renewal.
    Busy(Busy, Duration),
}

/// Decides on tries.
pub struct Evaluator<'a> {
    pub locks: &'a LockTable,
    pub own_leases: &'a OwnLeases,
    /// The poll interval of waiters.
    pub poll: Duration,
}

impl Evaluator<'_> {
    pub fn decide_acquire(
        &self,
        call: &AcquireTry<'_>,
        copies: &mut [WorkingCopy],
    ) -> Result<CasDecision<TryOutcome>> {
        if let Some(granted) = self.resume_attempt(&call.attempt_hash, copies)? {
            return Ok(CasDecision::Write(granted));
        }
        let request = call.request;
        let owner = request.owner.as_ref().map(owner_hash);
        let verdicts: Vec<Admission> = copies
            .iter()
            .map(|copy| {
                let held = copy.item.state.holds.iter();
                let held = held.filter(|hold| matches!(copy.observed.phase(hold), HoldPhase::Held(_)));
                match evaluate(owner, request.mode, held.map(StoredHold::active_hold)) {
                    Admission::Free if copy.in_lock_delay() || copy.is_reserved(request.mode) => {
                        Admission::Blocked
                    }
                    verdict => verdict,
                }
            })
            .collect();
        match evaluate_all(request, call.waits, verdicts.iter().copied().map(Ok))? {
            Admission::Free => {
                let fence = self.locks.next_fence(copies)?;
                Ok(CasDecision::Write(admit(call, copies, fence)))
            }
            Admission::Reenter(fence) => {
                refuse_revoked(copies, |hold| hold.fence == fence)?;
                Ok(CasDecision::Write(admit(call, copies, fence)))
            }
            Admission::Upgrade => Err(Error::Deadlock(request.key.names.iter().cloned().collect())),
            Admission::Blocked => {
                let first = verdicts.iter().position(|verdict| *verdict != Admission::Free).unwrap_or(0);
                self.announce_intent(call, copies);
                let busy = TryOutcome::Busy(copies[first].busy(), copies[first].first_end());
                Ok(CasDecision::write_if_changed(copies, busy))
            }
        }
    }

    /// Restarts the lease of an attempt that still holds all of its names. Otherwise ends what is left of it, and the attempt
    /// is treated like a new one.
    fn resume_attempt(&self, attempt_hash: &str, copies: &mut [WorkingCopy]) -> Result<Option<TryOutcome>> {
        let first = copies[0].item.state.find(attempt_hash).cloned();
        let held = |copy: &WorkingCopy| {
            let hold = copy.item.state.find(attempt_hash)?;
            let same = first.as_ref().is_some_and(|first| first.fence == hold.fence);
            (same && self.own_leases.is_active(hold, &copy.observed)).then_some(())
        };
        if let (Some(first), Some(())) = (&first, copies.iter().map(held).collect::<Option<()>>()) {
            refuse_revoked(copies, |hold| hold.attempt_hash == attempt_hash)?;
            copies.iter_mut().for_each(|copy| copy.renew(attempt_hash));
            let ttl = Duration::from_millis(first.lease.ms);
            return Ok(Some(TryOutcome::Granted { fence: first.fence, mode: first.mode, ttl }));
        }
        for copy in copies {
            match copy.item.state.find(attempt_hash) {
                Some(hold) if self.own_leases.is_active(hold, &copy.observed) => copy.end(attempt_hash),
                Some(_) => copy.end_uncleanly(attempt_hash),
                None => {}
            }
        }
        Ok(None)
    }

    /// Marks the item for a waiter that wants the lock exclusively: new shared holders could otherwise keep it out for ever.
    fn announce_intent(&self, call: &AcquireTry<'_>, copies: &mut [WorkingCopy]) {
        if call.request.mode != Mode::Exclusive || !call.waits {
            return;
        }
        let lasts = (self.poll * 4).max(Duration::from_secs(2));
        for copy in copies {
            let soon = after(copy.observed.wall, lasts / 2);
            let shared = copy.item.state.holds.iter().any(|hold| hold.mode != Mode::Exclusive);
            let intent = &mut copy.item.state.exclusive_intent;
            if shared && intent.as_ref().is_none_or(|intent| intent.ends_us < soon) {
                let ends_us = after(copy.observed.wall, lasts);
                *intent = Some(ExclusiveIntent { attempt_hash: call.attempt_hash.clone(), ends_us });
                copy.dirty = true;
            }
        }
    }
}

fn admit(call: &AcquireTry<'_>, copies: &mut [WorkingCopy], fence: Fence) -> TryOutcome {
    let request = call.request;
    let several = request.key.names.count() > 1;
    for copy in copies {
        copy.sweep();
        if request.mode == Mode::Exclusive {
            // Other waiters with the same intent announce it again.
            copy.item.state.exclusive_intent = None;
        }
        copy.item.fence = copy.item.fence.max(Some(fence));
        let hold = StoredHold {
            attempt_hash: call.attempt_hash.clone(),
            owner: request.owner.as_ref().map(|owner| owner_hash(owner).to_hex()),
            mode: request.mode,
            fence,
            lease: copy.start_timer(millis_up(request.ttl)),
            lock_delay_ms: millis(request.lock_delay),
            min_hold_ms: millis(request.min_hold),
            since: copy.observed.wall,
            holder: (*request.holder).clone(),
            names: if several { request.key.names.iter().cloned().collect() } else { Vec::new() },
            revoked: None,
        };
        copy.item.state.add(hold);
    }
    TryOutcome::Granted { fence, mode: request.mode, ttl: request.ttl }
}

impl WorkingCopy {
    /// Whether a lock-delay keeps every request from the lock.
    fn in_lock_delay(&self) -> bool {
        let state = &self.item.state;
        state.lock_delay.as_ref().is_some_and(|delay| !self.observed.remaining(delay, 0).is_zero())
            || state.holds.iter().any(|hold| matches!(self.observed.phase(hold), HoldPhase::LockDelay(_)))
    }

    /// Whether a waiter's exclusive intent keeps a shared request from the lock.
    fn is_reserved(&self, mode: Mode) -> bool {
        let wall = self.observed.wall.as_micros();
        let intent = self.item.state.exclusive_intent.as_ref();
        mode != Mode::Exclusive && intent.is_some_and(|intent| intent.ends_us > wall)
    }

    fn busy(&self) -> Busy {
        let mut held = self.held();
        held.truncate(LockView::BUSY);
        Busy { name: self.name.clone(), held, waiting: 0 }
    }

    /// How long it takes until the first timer of the lock has elapsed, if no holder renews.
    fn first_end(&self) -> Duration {
        let holds = self.item.state.holds.iter().map(|hold| match self.observed.phase(hold) {
            HoldPhase::Held(left) | HoldPhase::LockDelay(left) => left,
            HoldPhase::Ended => Duration::MAX,
        });
        let delay = self.item.state.lock_delay.iter().map(|delay| self.observed.remaining(delay, 0));
        holds
            .chain(delay)
            .filter(|left| !left.is_zero())
            .min()
            .unwrap_or(Duration::MAX / 4)
            .min(Duration::MAX / 4)
    }
}
