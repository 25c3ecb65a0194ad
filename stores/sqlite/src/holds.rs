//! The holds of a lock as stored, and how they end by time or by the end of their process.

use lockkeeper_core::{Attempt, BootInstant, EventKind, HolderView, LockName, Names, Result};
use lockkeeper_host::Liveness;
use rusqlite::params;

use crate::codec::{self, StoredHold, instant_nanos, signed};
use crate::statements;
use crate::transaction::Tx;

impl Tx<'_> {
    pub fn hold(&self, attempt: &Attempt) -> Result<Option<StoredHold>> {
        self.one(statements::HOLD, [attempt.as_bytes()], StoredHold::read)
    }

    /// The holds of a name whose leases last, oldest first. A writing transaction ends the others.
    pub fn live(&mut self, name: &LockName) -> Result<Vec<StoredHold>> {
        let mut holds = self.all(statements::HOLDS, [name.as_str()], StoredHold::read)?;
        let now = self.now.moment;
        if holds.iter().any(|hold| hold.expires <= now) {
            self.needs_write = true;
            if self.writes {
                for hold in holds.iter().filter(|hold| hold.expires <= now) {
                    self.expire(hold, hold.expires)?;
                }
            }
            holds.retain(|hold| hold.expires > now);
        }
        Ok(holds)
    }

    /// Ends the holds of dead processes. A lingering hold was released, so it does not need its process.
    pub fn remove_dead_holders(&mut self, names: &Names) -> Result<bool> {
        let mut any = false;
        for name in names {
            for hold in self.live(name)? {
                if !hold.lingering && self.liveness(&hold.process) == Liveness::Gone {
                    (any, self.needs_write) = (true, true);
                    if self.writes {
                        self.expire(&hold, self.now.moment)?;
                    }
                }
            }
        }
        Ok(any && self.writes)
    }

    pub fn remove(&mut self, hold: &StoredHold) -> Result<()> {
        self.change(statements::REMOVE_HOLD, [hold.attempt.as_bytes()])?;
        if hold.revoked {
            self.change(statements::REMOVE_REVOKED, [hold.attempt.as_bytes()])?;
        }
        for name in &hold.names {
            let row = params![name.as_str(), signed(hold.fence.get()), hold.seq];
            self.change(statements::REMOVE_HELD_NAME, row)?;
        }
        self.mark_changed(&hold.names);
        Ok(())
    }

    /// Removes a hold that was not released. The lock-delay of its names, if the request had one, counts from `at`.
    pub fn end_uncleanly(&mut self, hold: &StoredHold, at: BootInstant) -> Result<()> {
        self.remove(hold)?;
        let until = at + hold.lock_delay;
        if until > self.now.moment && !hold.lock_delay.is_zero() && !hold.lingering {
            for name in &hold.names {
                self.change(statements::SET_DELAY, params![name.as_str(), instant_nanos(until)])?;
            }
        }
        Ok(())
    }

    pub fn end_expired(&mut self, attempt: &Attempt) -> Result<()> {
        match self.hold(attempt)? {
            Some(hold) => self.expire(&hold, hold.expires),
            None => Ok(()),
        }
    }

    /// Ends a hold. The lock-delay counts from the end of the lease, not from when a process noticed it.
    fn expire(&mut self, hold: &StoredHold, at: BootInstant) -> Result<()> {
        self.end_uncleanly(hold, at)?;
        if hold.lingering {
            return Ok(());
        }
        let expired = EventKind::Expired { fence: hold.fence };
        self.record_event(hold.names.as_slice(), &expired, Some(&hold.holder))
    }

    /// The end of the lock-delay of a name.
    pub fn delayed(&self, name: &LockName) -> Result<Option<BootInstant>> {
        let until = self.one(statements::DELAY, [name.as_str()], |row| row.get::<_, i64>(0))?;
        let until = until.map(|until| BootInstant::from_nanos(until.unsigned_abs()));
        Ok(until.filter(|until| *until > self.now.moment))
    }

    /// Holders as other clients may see them.
    pub fn holder_views(&self, holds: &[StoredHold]) -> Result<Vec<HolderView>> {
        let view = |hold: &StoredHold| {
            Ok(HolderView { revoked: self.revoke_reason(hold)?, ..hold.view(self.now.moment) })
        };
        holds.iter().map(view).collect()
    }

    /// Removes some expired leases, delays and records that no client asks for. One call removes at most 32 of each, so
    /// that a million leases that end together do not block the other clients.
    pub fn sweep(&mut self) -> Result<()> {
        let now = instant_nanos(self.now.moment);
        for hold in self.all(statements::HOLDS_DUE, [now], StoredHold::read)? {
            self.expire(&hold, hold.expires)?;
        }
        for name in self.all(statements::DELAYS_DUE, [now], |row| codec::name(row, 0))? {
            self.change(statements::REMOVE_DELAY, [name.as_str()])?;
            self.mark_changed([&name]);
        }
        self.change(statements::REMOVE_OLD_RECORDS, [now])?;
        self.sweep_limits()
    }
}
