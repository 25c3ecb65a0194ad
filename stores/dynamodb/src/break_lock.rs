//! Breaking and revoking a lock. A break ends the holds at once; a revoke marks them, so that they are not renewed any more, and
//! the lock is free when the holders have stopped or their leases have expired.

use std::collections::BTreeMap;
use std::sync::Arc;

use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{Error, Fence, LockName, Names, Result};

use crate::cas::{CasDecision, LockTable, WorkingCopy};
use crate::codec::StoredHold;
use crate::observation::HoldPhase;

impl WorkingCopy {
    /// Marks the holds that match. Their leases stay as they are.
    fn mark_revoked(&mut self, reason: &str, matches: impl Fn(&StoredHold) -> bool) {
        let (write, state) = (self.next_revision, &mut self.item.state);
        for hold in state.holds.iter_mut().filter(|hold| matches(hold)) {
            hold.revoked = Some(write);
            self.dirty = true;
        }
        state.revoke_reasons.insert(write, reason.to_owned());
        state.remove_unused_reasons();
    }
}

/// The reason for which a matching hold was revoked, under any of the names.
pub fn revoke_reason(copies: &[WorkingCopy], matches: impl Fn(&StoredHold) -> bool) -> Option<&str> {
    copies.iter().find_map(|copy| {
        let state = &copy.item.state;
        state.holds.iter().filter(|hold| matches(hold)).find_map(|hold| state.revoke_reason(hold))
    })
}

/// A revoked holder can neither resume its attempt nor re-enter.
pub fn refuse_revoked(copies: &[WorkingCopy], matches: impl Fn(&StoredHold) -> bool) -> Result<()> {
    match revoke_reason(copies, matches) {
        Some(reason) => Err(Error::Lost(LossReason::Revoked(reason.into()).to_string())),
        None => Ok(()),
    }
}

/// Breaks and revokes locks.
pub struct LockBreaker {
    pub locks: Arc<LockTable>,
}

impl LockBreaker {
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let decide = |copies: &mut [WorkingCopy]| {
            let fence = self.locks.next_fence(copies)?;
            let copy = &mut copies[0];
            copy.item.fence = Some(fence);
            let holds = std::mem::take(&mut copy.item.state.holds);
            copy.item.state.lock_delay = None;
            copy.item.state.observations.clear();
            copy.item.state.remove_unused_reasons();
            copy.dirty = true;
            let mut broken = BTreeMap::new();
            for hold in holds {
                if matches!(copy.observed.phase(&hold), HoldPhase::Held(_)) && !hold.is_lingering() {
                    copy.start_lock_delay(hold.lock_delay_ms);
                    broken.insert(hold.attempt_hash, hold.names);
                }
            }
            Ok(CasDecision::Write((fence, broken)))
        };
        let ((fence, broken), _) = self.locks.update(&Names::from(name.clone()), decide).await?;
        tracing::info!(%name, reason, %fence, "a lock was broken");
        self.locks.queues.wake(std::iter::once(name));
        // A grant of several names is lost as a whole. The holder learns of it by its next renewal in any case.
        for (attempt_hash, names) in broken {
            for other in names.into_iter().filter(|other| other != name) {
                self.end_under_name(&attempt_hash, &other).await;
            }
        }
        Ok(fence)
    }

    async fn end_under_name(&self, attempt_hash: &str, name: &LockName) {
        let decide = |copies: &mut [WorkingCopy]| {
            copies[0].end_uncleanly(attempt_hash);
            Ok(CasDecision::write_if_changed(copies, ()))
        };
        match self.locks.update(&Names::from(name.clone()), decide).await {
            Ok(_) => self.locks.queues.wake(std::iter::once(name)),
            Err(error) => {
                tracing::warn!(%name, %error, "a name of a broken grant was not freed; it is free when its ttl has expired")
            }
        }
    }

    /// Marks every grant of the lock. Ends lingering holds and a lock-delay.
    pub async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let decide = |copies: &mut [WorkingCopy]| {
            let fence = self.locks.next_fence(copies)?;
            let copy = &mut copies[0];
            copy.item.fence = Some(fence);
            copy.item.state.lock_delay = None;
            let observed = copy.observed.clone();
            let held = |hold: &StoredHold| {
                !hold.is_lingering() && matches!(observed.phase(hold), HoldPhase::Held(_))
            };
            copy.item.state.holds.retain(held);
            copy.mark_revoked(reason, |_| true);
            copy.dirty = true;
            let several = copy.item.state.holds.iter().filter(|hold| !hold.names.is_empty());
            let several: BTreeMap<_, _> =
                several.map(|hold| (hold.attempt_hash.clone(), hold.names.clone())).collect();
            Ok(CasDecision::Write((fence, several)))
        };
        let ((fence, several), _) = self.locks.update(&Names::from(name.clone()), decide).await?;
        tracing::info!(%name, reason, %fence, "a lock was revoked");
        self.locks.queues.wake(std::iter::once(name));
        // A grant of several names is revoked as a whole. Its renewal checks all of its names, so one mark reaches the holder.
        for (attempt_hash, names) in several {
            for other in names.into_iter().filter(|other| other != name) {
                self.revoke_under_name(&attempt_hash, &other, reason).await;
            }
        }
        Ok(fence)
    }

    async fn revoke_under_name(&self, attempt_hash: &str, name: &LockName, reason: &str) {
        let decide = |copies: &mut [WorkingCopy]| {
            copies[0].mark_revoked(reason, |hold| hold.attempt_hash == attempt_hash);
            Ok(CasDecision::write_if_changed(copies, ()))
        };
        if let Err(error) = self.locks.update(&Names::from(name.clone()), decide).await {
            tracing::warn!(%name, %error, "a name of a revoked grant was not marked; the holder learns of the revoke by another name");
        }
    }
}
