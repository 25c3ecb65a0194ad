//! Release: ends a grant, keeps it for the rest of its minimum hold, or removes a waiting request from the queue.

use lockkeeper_core::{BootInstant, EventKind, ReleaseOutcome, RequestKey, Result};
use lockkeeper_host::random_128;
use rusqlite::params;

use crate::codec::{StoredHold, instant_nanos, signed};
use crate::statements;
use crate::transaction::Tx;

impl Tx<'_> {
    /// Releases a grant, or removes a waiting request from the queue.
    pub fn release(&mut self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let Some(hold) = self.hold(&key.attempt)? else {
            let (_, Some(ticket)) = self.find_attempt(&key.attempt)? else {
                return Ok(ReleaseOutcome::AlreadyGone);
            };
            return self.withdraw_ticket(ticket).map(|()| ReleaseOutcome::Released);
        };
        if hold.expires <= self.now.moment {
            self.end_expired(&hold.attempt)?;
            return Ok(ReleaseOutcome::AlreadyGone);
        }
        let released = EventKind::Released { fence: hold.fence };
        self.record_event(hold.names.as_slice(), &released, Some(&hold.holder))?;
        let earliest_end = hold.granted + hold.min_hold;
        // A revoked lock is free at once: the operator who revoked it wants it to be.
        if earliest_end > self.now.moment && !hold.revoked {
            self.linger(&hold, earliest_end)?
        } else {
            self.remove(&hold)?
        }
        Ok(ReleaseOutcome::Released)
    }

    /// Removes a request from the queue; a grant is left to its ttl.
    pub fn withdraw(&mut self, key: &RequestKey) -> Result<()> {
        match self.find_attempt(&key.attempt)? {
            (false, Some(ticket)) => self.withdraw_ticket(ticket),
            _ => Ok(()),
        }
    }

    /// Keeps a released hold until its minimum hold is over, under an attempt that no client knows.
    fn linger(&mut self, hold: &StoredHold, until: BootInstant) -> Result<()> {
        self.after.durable = true;
        let unknown_attempt = random_128();
        let row = params![hold.attempt.as_bytes(), unknown_attempt, instant_nanos(until)];
        self.change(statements::LINGER, row)?;
        for name in &hold.names {
            let row = params![name.as_str(), signed(hold.fence.get()), hold.seq, unknown_attempt];
            self.change(statements::LINGER_HELD_NAME, row)?;
            self.after.changed.insert(name.clone());
            // The head of the queue has a timer for the end of the lease, which is earlier now.
            if until < hold.expires
                && let Some(head) = self.queue_head(name)?
                && let Some(entry) = self.entry(head)?.filter(|entry| entry.peer != self.identity.peer)
            {
                self.wake_peer(entry.peer, head);
            }
        }
        Ok(())
    }
}
