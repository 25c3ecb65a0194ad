//! Acquire: handles one lock request in a transaction, and writes the grant.

use lockkeeper_core::admission::{Admission, evaluate, evaluate_all};
use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{
    Attempt, BootInstant, Busy, Error, EventKind, Fence, Grant, LockName, LockRequest, LockView,
    RenewOutcome, Result, Wait,
};
use rusqlite::params;

use crate::codec::{QueueTicket, StoredHold, duration_nanos, instant_nanos, mode_number, names_text, signed};
use crate::statements;
use crate::transaction::Tx;

/// The answer of a transaction to a lock request.
#[derive(Debug)]
pub(crate) enum AcquireReply {
    Granted(Grant),
    Busy(Busy),
    /// The request waits in the queue with this ticket until this instant.
    Waiting(QueueTicket, BootInstant),
}

impl Tx<'_> {
    /// Handles a lock request. A request with a known attempt is a retry: a grant keeps its fence and starts its lease
    /// again, and a waiter keeps its position in the queue.
    pub fn acquire(&mut self, request: &LockRequest) -> Result<AcquireReply> {
        // Fast path for the usual case: a new attempt for one lock without holder, waiter or delay.
        if let [name] = request.key.names.as_slice()
            && self.is_new_and_free(&request.key.attempt, name)?
        {
            let fence = self.next_fence()?;
            return self.insert_hold(request, fence).map(AcquireReply::Granted);
        }
        match self.find_attempt(&request.key.attempt)? {
            (true, _) => match (self.renew(&request.key.attempt)?, self.hold(&request.key.attempt)?) {
                (RenewOutcome::Renewed, Some(hold)) => {
                    return Ok(AcquireReply::Granted(hold.grant(self.sent)));
                }
                (RenewOutcome::Revoked(reason), _) => {
                    return Err(Error::Lost(LossReason::Revoked(reason).to_string()));
                }
                _ => self.end_expired(&request.key.attempt)?,
            },
            (_, Some(ticket)) => {
                let until = self.take_over(ticket)?;
                return Ok(AcquireReply::Waiting(ticket, until));
            }
            (false, None) => {}
        }
        match self.evaluate_request(request, None)? {
            Admission::Free => {
                let fence = self.next_fence()?;
                self.insert_hold(request, fence).map(AcquireReply::Granted)
            }
            Admission::Reenter(fence) => self.insert_hold(request, fence).map(AcquireReply::Granted),
            Admission::Upgrade => Err(Error::Deadlock(request.key.names.iter().cloned().collect())),
            Admission::Blocked if request.wait == Wait::No => {
                self.busy(request, QueueTicket::MAX).map(AcquireReply::Busy)
            }
            Admission::Blocked => {
                self.enqueue(request).map(|(ticket, until)| AcquireReply::Waiting(ticket, until))
            }
        }
    }

    fn is_new_and_free(&self, attempt: &Attempt, name: &LockName) -> Result<bool> {
        let found =
            self.one(statements::IN_USE, params![attempt.as_bytes(), name.as_str()], |row| row.get(0))?;
        Ok(found == Some(false))
    }

    /// Whether an attempt holds its locks, and its ticket if it waits.
    pub fn find_attempt(&self, attempt: &Attempt) -> Result<(bool, Option<QueueTicket>)> {
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        Ok(self.one(statements::FIND_ATTEMPT, [attempt.as_bytes()], read)?.unwrap_or((false, None)))
    }

    /// Evaluates the admission rule for all names of a request together. `ticket` is the request's ticket if it waits in
    /// the queue.
    pub fn evaluate_request(
        &mut self,
        request: &LockRequest,
        ticket: Option<QueueTicket>,
    ) -> Result<Admission> {
        let admission = self.evaluate_names(request, ticket);
        // The transaction looks for dead processes only if a holder blocks the request.
        match admission {
            Ok(Admission::Free | Admission::Reenter(_)) => admission,
            _ if self.remove_dead_holders(&request.key.names)? => self.evaluate_names(request, ticket),
            _ => admission,
        }
    }

    fn evaluate_names(&mut self, request: &LockRequest, ticket: Option<QueueTicket>) -> Result<Admission> {
        let each = request.key.names.iter().map(|name| {
            let holds = self.live(name)?;
            let admission = evaluate(request.owner, request.mode, holds.iter().map(StoredHold::active_hold));
            let ahead = |head| ticket.is_none_or(|ticket| head < ticket);
            let held_back = admission == Admission::Free
                && (self.delayed(name)?.is_some() || self.queue_head(name)?.is_some_and(ahead));
            Ok(if held_back { Admission::Blocked } else { admission })
        });
        let admission = evaluate_all(request, ticket.is_some(), each)?;
        if let Admission::Reenter(fence) = admission {
            self.refuse_revoked(&request.key.names, fence)?;
        }
        Ok(admission)
    }

    /// Writes a grant of this process.
    pub fn insert_hold(&mut self, request: &LockRequest, fence: Fence) -> Result<Grant> {
        let LockRequest { key, owner, mode, ttl, lock_delay, min_hold, holder, .. } = request;
        let seq = self.next_ticket();
        let process = &self.identity.process;
        self.change(
            statements::ADD_HOLD,
            params![
                key.attempt.as_bytes(),
                names_text(&key.names),
                owner.map(|owner| *owner.as_bytes()),
                mode_number(*mode),
                signed(fence.get()),
                seq,
                instant_nanos(self.now.moment),
                signed(self.now.wall.as_micros()),
                instant_nanos(self.now.moment + *ttl),
                duration_nanos(*ttl),
                duration_nanos(*lock_delay),
                duration_nanos(*min_hold),
                holder.host,
                holder.pid,
                holder.label,
                process.pid,
                signed(process.start),
                signed(process.namespace)
            ],
        )?;
        for name in &key.names {
            let row = params![name.as_str(), signed(fence.get()), seq, key.attempt.as_bytes()];
            self.change(statements::ADD_HELD_NAME, row)?;
        }
        self.after.durable = true;
        self.after.granted.push(key.clone());
        self.after.changed.extend(key.names.iter().cloned());
        self.record_event(key.names.as_slice(), &EventKind::Granted { fence }, Some(holder))?;
        Ok(Grant { key: key.clone(), fence, mode: *mode, ttl: *ttl, sent_at: self.sent, lease: *ttl })
    }

    /// The lock that blocks a request with this ticket, with its holders and the length of its queue.
    pub fn busy(&mut self, request: &LockRequest, ticket: QueueTicket) -> Result<Busy> {
        let names = &request.key.names;
        let mut name = names.first();
        for one in names {
            let holds = self.live(one)?;
            let admission = evaluate(request.owner, request.mode, holds.iter().map(StoredHold::active_hold));
            if self.queue_head(one)?.is_some_and(|head| head < ticket)
                || self.delayed(one)?.is_some()
                || admission == Admission::Blocked
            {
                name = one;
                break;
            }
        }
        let held = self.live(name)?;
        let held = self.holder_views(&held[..held.len().min(LockView::BUSY)])?;
        Ok(Busy { name: name.clone(), held, waiting: self.queue_length(name)? })
    }
}
