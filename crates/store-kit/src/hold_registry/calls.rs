//! The calls of `acquire` and `release` that are registered, from their first request to their end.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Names, ReleaseOutcome};
use lockkeeper_host::Clock;

use super::{HoldRegistry, OwnHold};
use crate::{AttemptHash, CancelSignal};

/// How long a request with an unknown outcome is kept for a caller that sends it again.
const KEPT_FOR_CALLER: Duration = Duration::from_secs(5);

impl<G> HoldRegistry<G> {
    /// Registers a request before anything is sent for it. If its call is dropped before the outcome is known, the process soon ends what
    /// the call may have acquired, unless a caller sends the request again.
    pub fn begin<'a>(
        &'a self,
        clock: &'a dyn Clock,
        attempt: AttemptHash,
        names: &'a Names,
        ttl: Duration,
    ) -> RegisteredCall<'a, G> {
        let (now, caller) = (clock.now(), Arc::<CancelSignal>::default());
        let mut table = self.table();
        let known_expiry = match table.holds.get(&attempt) {
            Some(hold) => Some(hold.expires),
            None => table.ending.contains(&attempt).then_some(now),
        };
        match table.holds.get_mut(&attempt) {
            // The same request again: the lease of its grant begins anew.
            Some(hold) => {
                hold.caller = Some(caller.clone());
                hold.expires = if hold.grant.is_some() { now + hold.ttl } else { BootInstant::NEVER };
            }
            None => {
                let hold = OwnHold::new(names, ttl, BootInstant::NEVER);
                table.holds.insert(attempt, OwnHold { caller: Some(caller.clone()), ..hold });
            }
        }
        RegisteredCall {
            registry: self,
            clock,
            attempt,
            names,
            ttl,
            caller,
            known_expiry,
            left_nothing: false,
        }
    }

    /// Ends a call. A call that left nothing proves nothing if an earlier call of the same attempt had no reply.
    fn end(&self, call: &RegisteredCall<'_, G>) {
        let RegisteredCall { attempt, names, ttl, left_nothing, .. } = *call;
        let (now, mut table) = (call.clock.now(), self.table());
        let Some(hold) = table.holds.get_mut(&attempt) else {
            drop(table);
            if !left_nothing {
                // A release came meanwhile, perhaps before the grant existed.
                self.schedule_cleanup(attempt, OwnHold::abandoned(names, ttl, now));
            }
            return;
        };
        match &hold.caller {
            Some(registered) if Arc::ptr_eq(registered, &call.caller) => {}
            // A call of the same attempt has replaced this one, and may have looked before the request of this one was applied.
            Some(_) => {
                hold.outcome_unknown |= !left_nothing;
                return;
            }
            None => return,
        }
        hold.caller = None;
        if hold.grant.is_none() {
            if left_nothing && !hold.outcome_unknown {
                table.holds.remove(&attempt);
            } else {
                (hold.expires, hold.outcome_unknown) = (now + hold.ttl.min(KEPT_FOR_CALLER), true);
                self.wake();
            }
        }
    }

    /// Removes the hold of an attempt and cancels its call, because the attempt is being released.
    pub fn begin_release<'a>(
        &'a self,
        clock: &'a dyn Clock,
        attempt: AttemptHash,
        names: &'a Names,
    ) -> UnfinishedRelease<'a, G> {
        let hold = self.table().holds.remove(&attempt);
        let caller = hold.as_ref().and_then(|hold| hold.caller.clone());
        if let Some(caller) = &caller {
            caller.cancel();
        }
        UnfinishedRelease { registry: self, clock, attempt, names, hold, caller, is_confirmed: false }
    }
}

/// A call of `acquire` that is registered. Dropping this ends its registration, also when the caller drops the call.
pub struct RegisteredCall<'a, G> {
    registry: &'a HoldRegistry<G>,
    clock: &'a dyn Clock,
    attempt: AttemptHash,
    names: &'a Names,
    ttl: Duration,
    /// Cancels the call.
    pub caller: Arc<CancelSignal>,
    /// `Some`: the attempt was known before this call, and its hold was to end at this time.
    pub known_expiry: Option<BootInstant>,
    /// The call got no grant, and left nothing in the store.
    pub left_nothing: bool,
}

impl<G> RegisteredCall<'_, G> {
    /// Undoes the renewal of an existing grant by this call.
    pub fn restore_expiry(&self) {
        let known = self.known_expiry.unwrap_or(BootInstant::NEVER);
        if let Some(hold) =
            self.registry.table().holds.get_mut(&self.attempt).filter(|hold| hold.grant.is_some())
        {
            hold.expires = hold.expires.min(known);
        }
        self.registry.wake();
    }
}

impl<G> Drop for RegisteredCall<'_, G> {
    fn drop(&mut self) {
        self.registry.end(self);
    }
}

/// A release that is in progress. If it fails, or its caller drops it, the registry goes on with it: no caller comes back for it.
pub struct UnfinishedRelease<'a, G> {
    registry: &'a HoldRegistry<G>,
    clock: &'a dyn Clock,
    attempt: AttemptHash,
    names: &'a Names,
    /// The hold that is released. `None`: this process knows of none.
    pub hold: Option<OwnHold<G>>,
    caller: Option<Arc<CancelSignal>>,
    is_confirmed: bool,
}

impl<G> UnfinishedRelease<'_, G> {
    /// Reports the end of the release, and returns its outcome. A cancelled call may have left the queue before this release looked.
    pub fn finish<E>(&mut self, done: Result<ReleaseOutcome, E>) -> Result<ReleaseOutcome, E> {
        self.is_confirmed = done.is_ok();
        match done {
            Ok(ReleaseOutcome::AlreadyGone)
                if self.caller.as_ref().is_some_and(|caller| caller.has_left_queue()) =>
            {
                Ok(ReleaseOutcome::Released)
            }
            done => done,
        }
    }
}

impl<G> Drop for UnfinishedRelease<'_, G> {
    fn drop(&mut self) {
        if self.is_confirmed {
            return;
        }
        let now = self.clock.now();
        let hold = self.hold.take().unwrap_or_else(|| OwnHold::abandoned(self.names, Duration::ZERO, now));
        let outcome_unknown = hold.outcome_unknown || hold.grant.is_none();
        self.registry.schedule_cleanup(self.attempt, OwnHold { outcome_unknown, expires: now, ..hold });
    }
}
