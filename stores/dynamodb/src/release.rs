//! Releasing a lock, and cancelling a request that has no answer yet.

use std::sync::Arc;

use lockkeeper_core::{ReleaseOutcome, RequestKey, Result};
use lockkeeper_store_kit::PendingRequests;

use crate::break_lock::revoke_reason;
use crate::cas::{CasDecision, LockTable, WorkingCopy};
use crate::codec::{StoredHold, millis};
use crate::keys::attempt_hash;
use crate::own_leases::OwnLeases;

/// Releases locks, and cancels requests.
pub struct Releaser {
    pub locks: Arc<LockTable>,
    pub own_leases: Arc<OwnLeases>,
    pub pending: Arc<PendingRequests>,
}

impl Releaser {
    pub async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let was_pending = self.pending.cancel(key.attempt);
        let released = self.release_holds(key).await?;
        Ok(if was_pending { ReleaseOutcome::Released } else { released })
    }

    pub async fn release_holds(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let attempt_hash = attempt_hash(&key.attempt);
        let decide = |copies: &mut [WorkingCopy]| {
            let mut released = ReleaseOutcome::AlreadyGone;
            let revoked = revoke_reason(copies, |hold| hold.attempt_hash == attempt_hash).is_some();
            for copy in &mut *copies {
                copy.clear_intent(&attempt_hash);
                let Some(hold) = copy.item.state.find(&attempt_hash).cloned() else { continue };
                if self.own_leases.is_active(&hold, &copy.observed) {
                    self.end_released(copy, &hold, revoked);
                    released = ReleaseOutcome::Released;
                } else {
                    copy.end_uncleanly(&attempt_hash);
                }
            }
            // A write of this attempt may still arrive. This write changes the revision, so the condition of the late one fails.
            copies[0].dirty |= released == ReleaseOutcome::AlreadyGone;
            Ok(CasDecision::Write(released))
        };
        let (released, _) = self.locks.update(&key.names, decide).await?;
        self.own_leases.remove(&attempt_hash);
        self.locks.queues.wake(key.names.iter());
        Ok(released)
    }

    /// Ends a hold, or lets it linger for the rest of its min-hold. A process that does not know when the hold began takes the
    /// whole min-hold. The min-hold of a revoked hold does not count: the operator wants the lock to be free.
    fn end_released(&self, copy: &mut WorkingCopy, hold: &StoredHold, revoked: bool) {
        let held = self.own_leases.held_for(hold, copy.observed.now);
        let left = hold.min_hold_ms.saturating_sub(millis(held));
        copy.end(&hold.attempt_hash);
        if left > 0 && !revoked {
            let lease = copy.start_timer(left);
            let lingering = StoredHold { attempt_hash: String::new(), owner: None, lease, ..hold.clone() };
            copy.item.state.add(lingering);
        }
        copy.sweep();
    }
}
