//! Break and revoke: an operator takes a lock away from its holders.
//!
//! A break ends the holds at once. A revoke marks them: a revoked hold cannot be renewed, its holder learns the reason at
//! its next renewal, and no waiter is granted the lock before the hold is released or its lease ends.

use std::collections::BTreeSet;

use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{Error, EventKind, Fence, LockName, Names, Result};
use rusqlite::params;

use crate::codec::StoredHold;
use crate::statements;
use crate::transaction::Tx;

impl Tx<'_> {
    /// Ends all holds of a name, draws a new fence, and ends a lock-delay of the name.
    pub fn break_lock(&mut self, name: &LockName, reason: &str) -> Result<Fence> {
        let holds = self.live(name)?;
        let fence = self.next_fence()?;
        self.change(statements::REMOVE_DELAY, [name.as_str()])?;
        for hold in &holds {
            self.end_uncleanly(hold, self.now.moment)?;
        }
        let event = EventKind::Broken { fence, reason: reason.to_owned() };
        self.record_event(&affected_names(name, &holds), &event, None)?;
        self.mark_changed([name]);
        Ok(fence)
    }

    /// Marks all holds of a name as revoked. A lingering hold ends at once, and so does a lock-delay of the name.
    pub fn revoke(&mut self, name: &LockName, reason: &str) -> Result<Fence> {
        self.change(statements::REVOKED_TABLE, [])?;
        self.change(statements::SWEEP_REVOKED, [])?;
        let holds = self.live(name)?;
        let fence = self.next_fence()?;
        self.change(statements::REMOVE_DELAY, [name.as_str()])?;
        for hold in &holds {
            if hold.lingering {
                self.remove(hold)?;
            } else {
                self.change(statements::REVOKE, [hold.attempt.as_bytes()])?;
                self.change(statements::ADD_REVOKED, params![hold.attempt.as_bytes(), reason])?;
            }
        }
        let event = EventKind::Revoked { fence, reason: reason.to_owned() };
        self.record_event(&affected_names(name, &holds), &event, None)?;
        self.mark_changed([name]);
        Ok(fence)
    }

    /// The reason why a hold is revoked, if it is.
    pub fn revoke_reason(&self, hold: &StoredHold) -> Result<Option<String>> {
        if !hold.revoked {
            return Ok(None);
        }
        self.one(statements::REVOKED, [hold.attempt.as_bytes()], |row| row.get(0))
    }

    /// Refuses re-entry into a revoked hold.
    pub fn refuse_revoked(&mut self, names: &Names, fence: Fence) -> Result<()> {
        for name in names {
            for hold in self.live(name)?.iter().filter(|hold| hold.fence == fence) {
                if let Some(reason) = self.revoke_reason(hold)? {
                    return Err(Error::Lost(LossReason::Revoked(reason.into()).to_string()));
                }
            }
        }
        Ok(())
    }
}

/// The name, and the other names of its holds: a grant of several names is lost as a whole, so the watchers of all of them
/// get the event.
fn affected_names(name: &LockName, holds: &[StoredHold]) -> Vec<LockName> {
    let mut others: BTreeSet<LockName> = holds.iter().flat_map(|hold| hold.names.iter().cloned()).collect();
    others.remove(name);
    [name.clone()].into_iter().chain(others).collect()
}
