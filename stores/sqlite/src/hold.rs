//! Grants: made, renewed, given back, taken away, and ended by time or by the death of their process.

use std::collections::BTreeSet;

use lockkeeper_core::lease::Why;
use lockkeeper_core::rules::{Verdict, judge};
use lockkeeper_core::{
    Ask, Attempt, Busy, Claim, Error, EventKind, Fence, Grant, LockName, LockView, Moment, Names, Release,
    Renewal, Result, Wait,
};
use lockkeeper_host::{Life, random_128};
use rusqlite::params;

use crate::rows::{Hold, Ticket, mode_number, moment, names_text, signed, span};
use crate::script;
use crate::tx::Tx;

/// The answer to an ask.
#[derive(Debug)]
pub(crate) enum Answer {
    Granted(Grant),
    Busy(Busy),
    /// It stands in line with this ticket, until then.
    Waiting(Ticket, Moment),
}

impl Tx<'_> {
    /// Handles an ask. The same attempt again is the same ask: a grant keeps its fence and counts its lease anew, a
    /// place in line is kept.
    pub fn ask(&mut self, ask: &Ask) -> Result<Answer> {
        // So it is nearly always: an attempt that is new, and a lock that nobody holds, waits for or holds back.
        if let [name] = ask.claim.names.as_slice()
            && self.is_untouched(&ask.claim.attempt, name)?
        {
            let fence = self.next_fence()?;
            return self.admit(ask, fence).map(Answer::Granted);
        }
        match self.whereabouts(&ask.claim.attempt)? {
            (true, _) => match (self.extend(&ask.claim.attempt)?, self.hold(&ask.claim.attempt)?) {
                (Renewal::Renewed, Some(hold)) => return Ok(Answer::Granted(hold.grant(self.sent))),
                (Renewal::Revoked(reason), _) => {
                    return Err(Error::Lost(Why::Revoked(reason).to_string()));
                }
                _ => self.end_expired(&ask.claim.attempt)?,
            },
            (_, Some(ticket)) => {
                let until = self.take_over(ticket)?;
                return Ok(Answer::Waiting(ticket, until));
            }
            (false, None) => {}
        }
        match self.verdict(ask, None)? {
            Verdict::Free => {
                let fence = self.next_fence()?;
                self.admit(ask, fence).map(Answer::Granted)
            }
            Verdict::Reenter(fence) => self.admit(ask, fence).map(Answer::Granted),
            Verdict::Upgrade => Err(Error::Deadlock(ask.claim.names.iter().cloned().collect())),
            Verdict::Blocked if ask.wait == Wait::No => self.busy(ask, Ticket::MAX).map(Answer::Busy),
            Verdict::Blocked => self.enqueue(ask).map(|(ticket, until)| Answer::Waiting(ticket, until)),
        }
    }

    fn is_untouched(&self, attempt: &Attempt, name: &LockName) -> Result<bool> {
        let found =
            self.one(script::TOUCHED, params![attempt.as_bytes(), name.as_str()], |row| row.get(0))?;
        Ok(found == Some(false))
    }

    /// Whether an attempt holds, and its ticket if it waits.
    pub fn whereabouts(&self, attempt: &Attempt) -> Result<(bool, Option<Ticket>)> {
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        Ok(self.one(script::WHERE_IS, [attempt.as_bytes()], read)?.unwrap_or((false, None)))
    }

    pub fn hold(&self, attempt: &Attempt) -> Result<Option<Hold>> {
        self.one(script::HOLD, [attempt.as_bytes()], Hold::read)
    }

    pub fn admit(&mut self, ask: &Ask, fence: Fence) -> Result<Grant> {
        let Ask { claim, owner, mode, ttl, lock_delay, min_hold, holder, .. } = ask;
        let turn = self.next_ticket();
        let process = &self.home.process;
        self.change(
            script::ADD_HOLD,
            params![
                claim.attempt.as_bytes(),
                names_text(&claim.names),
                owner.map(|owner| *owner.as_bytes()),
                mode_number(*mode),
                signed(fence.get()),
                turn,
                moment(self.now.moment),
                signed(self.now.wall.as_micros()),
                moment(self.now.moment + *ttl),
                span(*ttl),
                span(*lock_delay),
                span(*min_hold),
                holder.host,
                holder.pid,
                holder.label,
                process.pid,
                signed(process.start),
                signed(process.namespace)
            ],
        )?;
        for name in &claim.names {
            let row = params![name.as_str(), signed(fence.get()), turn, claim.attempt.as_bytes()];
            self.change(script::ADD_STAKE, row)?;
        }
        self.after.durable = true;
        self.after.changed.extend(claim.names.iter().cloned());
        self.tell(claim.names.as_slice(), &EventKind::Granted { fence }, Some(holder))?;
        Ok(Grant { claim: claim.clone(), fence, mode: *mode, ttl: *ttl, sent_at: self.sent, lease: *ttl })
    }

    /// Counts the lease anew, unless it is over. Whoever renews it is its process from now on.
    pub fn extend(&mut self, attempt: &Attempt) -> Result<Renewal> {
        let process = &self.home.process;
        let row = params![
            attempt.as_bytes(),
            moment(self.now.moment),
            process.pid,
            signed(process.start),
            signed(process.namespace)
        ];
        if self.change(script::EXTEND, row)? == 1 {
            return Ok(Renewal::Renewed);
        }
        let hold = self.hold(attempt)?.filter(|hold| hold.expires > self.now.moment);
        let reason = hold.map(|hold| self.revoked(&hold)).transpose()?.flatten();
        Ok(reason.map_or(Renewal::Lost, |reason| Renewal::Revoked(reason.into())))
    }

    /// Gives back a grant, or takes an ask out of the line.
    pub fn release(&mut self, claim: &Claim) -> Result<Release> {
        let Some(hold) = self.hold(&claim.attempt)? else {
            let (_, Some(ticket)) = self.whereabouts(&claim.attempt)? else {
                return Ok(Release::AlreadyGone);
            };
            return self.leave(ticket).map(|()| Release::Released);
        };
        if hold.expires <= self.now.moment {
            self.end_expired(&hold.attempt)?;
            return Ok(Release::AlreadyGone);
        }
        let released = EventKind::Released { fence: hold.fence };
        self.tell(hold.names.as_slice(), &released, Some(&hold.holder))?;
        let stays = hold.granted + hold.min_hold;
        // Whoever revoked it wants it to be free.
        if stays > self.now.moment && !hold.revoked {
            self.linger(&hold, stays)?
        } else {
            self.remove(&hold)?
        }
        Ok(Release::Released)
    }

    /// Takes a request out of the queue; a grant is left to its ttl.
    pub fn withdraw(&mut self, claim: &Claim) -> Result<()> {
        match self.whereabouts(&claim.attempt)? {
            (false, Some(ticket)) => self.leave(ticket),
            _ => Ok(()),
        }
    }

    fn linger(&mut self, hold: &Hold, until: Moment) -> Result<()> {
        self.after.durable = true;
        let key = random_128();
        self.change(script::DISOWN, params![hold.attempt.as_bytes(), key, moment(until)])?;
        for name in &hold.names {
            let row = params![name.as_str(), signed(hold.fence.get()), hold.turn, key];
            self.change(script::DISOWN_STAKE, row)?;
            self.after.changed.insert(name.clone());
            // Whoever is first in line watches for the end of the lease, which has come nearer.
            if until < hold.expires
                && let Some(first) = self.front(name)?
                && let Some(waiter) = self.waiter(first)?.filter(|waiter| waiter.peer != self.home.peer)
            {
                self.nudge(waiter.peer, first);
            }
        }
        Ok(())
    }

    pub fn remove(&mut self, hold: &Hold) -> Result<()> {
        self.change(script::REMOVE_HOLD, [hold.attempt.as_bytes()])?;
        if hold.revoked {
            self.change(script::REMOVE_REVOKED, [hold.attempt.as_bytes()])?;
        }
        for name in &hold.names {
            let row = params![name.as_str(), signed(hold.fence.get()), hold.turn];
            self.change(script::REMOVE_STAKE, row)?;
        }
        self.touch(&hold.names);
        Ok(())
    }

    /// Takes a lock away from whoever holds it, and lets the fence move on. A lock that is only held back is freed.
    pub fn break_lock(&mut self, name: &LockName, reason: &str) -> Result<Fence> {
        let holds = self.live(name)?;
        let fence = self.next_fence()?;
        self.change(script::REMOVE_DELAY, [name.as_str()])?;
        let mut others = BTreeSet::new();
        for hold in holds {
            self.end_uncleanly(&hold, self.now.moment)?;
            others.extend(hold.names.iter().cloned());
        }
        // A grant of several names is lost as a whole: whoever watches one of the others has to hear of it too.
        others.remove(name);
        let names: Vec<LockName> = [name.clone()].into_iter().chain(others).collect();
        self.tell(&names, &EventKind::Broken { fence, reason: reason.to_owned() }, None)?;
        self.touch([name]);
        Ok(fence)
    }

    /// Removes a hold whose holder did not let go, and holds its names back from `at` on if it asked for that.
    fn end_uncleanly(&mut self, hold: &Hold, at: Moment) -> Result<()> {
        self.remove(hold)?;
        let until = at + hold.lock_delay;
        if until > self.now.moment && !hold.lock_delay.is_zero() && !hold.lingering {
            for name in &hold.names {
                self.change(script::SET_DELAY, params![name.as_str(), moment(until)])?;
            }
        }
        Ok(())
    }

    fn end_expired(&mut self, attempt: &Attempt) -> Result<()> {
        match self.hold(attempt)? {
            Some(hold) => self.expire(&hold, hold.expires),
            None => Ok(()),
        }
    }

    /// The delay counts from the end of the lease, not from the moment at which somebody noticed.
    fn expire(&mut self, hold: &Hold, at: Moment) -> Result<()> {
        self.end_uncleanly(hold, at)?;
        if hold.lingering {
            return Ok(());
        }
        self.tell(hold.names.as_slice(), &EventKind::Expired { fence: hold.fence }, Some(&hold.holder))
    }

    /// Who holds a name now, oldest first; a lease that is over ends here.
    pub fn live(&mut self, name: &LockName) -> Result<Vec<Hold>> {
        let mut holds = self.all(script::HOLDS, [name.as_str()], Hold::read)?;
        let now = self.now.moment;
        if holds.iter().any(|hold| hold.expires <= now) {
            self.due = true;
            if self.writes {
                for hold in holds.iter().filter(|hold| hold.expires <= now) {
                    self.expire(hold, hold.expires)?;
                }
            }
            holds.retain(|hold| hold.expires > now);
        }
        Ok(holds)
    }

    /// Ends what dead processes hold of these names. A released lock that only lingers needs no process.
    pub fn bury_holders(&mut self, names: &Names) -> Result<bool> {
        let mut any = false;
        for name in names {
            for hold in self.live(name)? {
                if !hold.lingering && self.life(&hold.process) == Life::Gone {
                    (any, self.due) = (true, true);
                    if self.writes {
                        self.expire(&hold, self.now.moment)?;
                    }
                }
            }
        }
        Ok(any && self.writes)
    }

    /// Until when a name is held back after an unclean end.
    pub fn delayed(&self, name: &LockName) -> Result<Option<Moment>> {
        let until = self.one(script::DELAY, [name.as_str()], |row| row.get::<_, i64>(0))?;
        let until = until.map(|until| Moment::from_nanos(until.unsigned_abs()));
        Ok(until.filter(|until| *until > self.now.moment))
    }

    /// Who is in the way of an ask at this place in its lines.
    pub fn busy(&mut self, ask: &Ask, place: Ticket) -> Result<Busy> {
        let names = &ask.claim.names;
        let mut name = names.first();
        for one in names {
            let holds = self.live(one)?;
            if self.front(one)?.is_some_and(|first| first < place)
                || self.delayed(one)?.is_some()
                || judge(ask.owner, ask.mode, holds.iter().map(Hold::stake)) == Verdict::Blocked
            {
                name = one;
                break;
            }
        }
        let held = self.live(name)?;
        let held = self.views(&held[..held.len().min(LockView::BUSY)])?;
        Ok(Busy { name: name.clone(), held, waiting: self.line_length(name)? })
    }

    /// Clears away some of what is over: leases, delays and records that nobody asks for any more. A little at a time,
    /// so that a million leases that end together do not stop everybody else.
    pub fn tidy(&mut self) -> Result<()> {
        let now = moment(self.now.moment);
        for hold in self.all(script::HOLDS_DUE, [now], Hold::read)? {
            self.expire(&hold, hold.expires)?;
        }
        for name in self.all(script::DELAYS_DUE, [now], |row| crate::rows::name(row, 0))? {
            self.change(script::REMOVE_DELAY, [name.as_str()])?;
            self.touch([&name]);
        }
        self.change(script::REMOVE_OLD_RECORDS, [now])?;
        Ok(())
    }
}
