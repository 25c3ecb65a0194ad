//! The lock table: the reference for every store, without clock, dice or IO.
//!
//! Told what is asked and what time it is, it answers at once or puts the ask in line; what happens to asks in line
//! comes out of [`Table::poll_effect`].
//!
//! ```
//! # use lockkeeper_core::{*, table::*};
//! # use std::{sync::Arc, time::Duration};
//! let mut table = Table::default();
//! let me = Arc::new(Holder::new("host", 1, None)?);
//! let ask = Ask::new(Attempt::from_bytes([7; 16]), LockName::new("orders/42")?, Duration::from_secs(30), me);
//! let now = Now { moment: Moment::from_nanos(0), wall: Wall::from_micros(1_000) };
//! let Answer::Granted(grant) = table.handle_ask(now, ask)? else { panic!("busy") };
//! assert_eq!(grant.fence.get(), 1_000);
//! assert_eq!(table.handle_release(now, &grant.claim), Release::Released);
//! # Ok::<(), Error>(())
//! ```

mod line;
mod slab;
mod state;

use std::collections::VecDeque;
use std::ops::Bound;
use std::sync::Arc;

use crate::lease;
use crate::rules::{Verdict, judge, judge_all};
use crate::{
    Acquired, Ask, Attempt, Busy, Claim, Error, Event, EventKind, Fence, Grant, Holder, LockName, LockPage,
    LockView, Moment, Names, Page, Release, Renewal, Result, Wait, Wall,
};
use smallvec::SmallVec;
use state::{Hold, HoldId, Ids, SlotId, State, Ticket, Waiter, ms64};

/// What time it is: the moment decides, the wall clock is the floor of fences and for display.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// On the boot-time clock.
    pub moment: Moment,
    /// On the wall clock.
    pub wall: Wall,
}

/// The answer to an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is yours.
    Granted(Grant),
    /// Someone else has it, and the ask does not wait.
    Busy(Busy),
    /// It stands in line; what becomes of it comes as an effect.
    Waiting,
}

/// Something the driver has to pass on.
#[derive(Clone, Debug)]
pub enum Effect {
    /// An ask in line was served, ran out of patience, or could not be served.
    Answer(Attempt, Result<Acquired>),
    /// Something happened to a lock; only while [`Table::set_watched`].
    Event(Event),
}

/// The lock table. See the [module](self).
#[derive(Clone, Debug, Default)]
pub struct Table {
    state: State,
    fence: Option<Fence>,
    ticket: Ticket,
    watched: bool,
    effects: VecDeque<Effect>,
}

impl Table {
    /// A table whose fences begin after `last`: what a store that remembers across restarts begins with.
    pub fn after(last: Option<Fence>) -> Self {
        Table { fence: last, ..Table::default() }
    }

    /// The fence of the newest grant or break.
    pub fn last_fence(&self) -> Option<Fence> {
        self.fence
    }

    /// A number greater than every fence and version so far, for a record's version or a fence outside of a grant.
    pub fn next_fence(&mut self, wall: Wall) -> Result<Fence> {
        let fence = Fence::after(self.fence, wall)?;
        self.fence = Some(fence);
        Ok(fence)
    }

    /// Whether events are wanted: nobody watching, nothing is written down.
    pub fn set_watched(&mut self, watched: bool) {
        self.watched = watched;
    }

    /// Handles an ask. The same attempt again is the same ask: a grant keeps its fence and counts its lease anew, a
    /// place in line is kept.
    pub fn handle_ask(&mut self, now: Now, ask: Ask) -> Result<Answer> {
        ask.check()?;
        self.handle_timeout(now);
        if let Some(id) = self.state.hold_of(&ask.claim.attempt) {
            self.refuse_revoked(id)?;
            self.extend(now, id);
            return Ok(Answer::Granted(self.grant_of(now, id)));
        }
        if self.state.tickets.contains_key(&ask.claim.attempt) {
            return Ok(Answer::Waiting);
        }
        let slots: Ids = ask.claim.names.iter().map(|name| self.state.slot_of(name)).collect();
        let answer = self.decide(now, ask, &slots);
        for slot in slots {
            self.state.tidy(slot);
        }
        answer
    }

    fn decide(&mut self, now: Now, ask: Ask, slots: &Ids) -> Result<Answer> {
        match self.verdict(&ask, slots, None)? {
            Verdict::Free => {
                let fence = self.next_fence(now.wall)?;
                Ok(Answer::Granted(self.admit(now, &ask, slots, fence)))
            }
            Verdict::Reenter(fence) => Ok(Answer::Granted(self.admit(now, &ask, slots, fence))),
            Verdict::Upgrade => Err(Error::Deadlock(ask.claim.names.iter().cloned().collect())),
            Verdict::Blocked if ask.wait == Wait::No => {
                Ok(Answer::Busy(self.busy(now, &ask, slots, Ticket::MAX)))
            }
            Verdict::Blocked => self.enqueue(now, ask, slots.clone()).map(|()| Answer::Waiting),
        }
    }

    /// What the rule says about all names of an ask together. `place` is its ticket if it stands in line already.
    fn verdict(&self, ask: &Ask, slots: &Ids, place: Option<Ticket>) -> Result<Verdict> {
        let state = &self.state;
        let each = slots.iter().map(|slot| {
            let ahead = |first| place.is_none_or(|place| first < place);
            Ok(match judge(ask.owner, ask.mode, state.stakes(*slot)) {
                Verdict::Free if state.delays.contains_key(slot) => Verdict::Blocked,
                Verdict::Free if state.front(*slot).is_some_and(ahead) => Verdict::Blocked,
                verdict => verdict,
            })
        });
        let verdict = judge_all(ask, place.is_some(), each)?;
        if let Verdict::Reenter(fence) = verdict {
            let holds = slots.iter().flat_map(|slot| &state.slots[*slot].holds);
            let own = holds.filter(|id| state.holds[**id].fence == fence);
            own.copied().try_for_each(|id| self.refuse_revoked(id))?;
        }
        Ok(verdict)
    }

    fn admit(&mut self, now: Now, ask: &Ask, slots: &Ids, fence: Fence) -> Grant {
        let id = self.state.add_hold(Hold::new(ask, slots.clone(), fence, now));
        self.tell(now, slots, EventKind::Granted { fence }, Some(&ask.holder));
        self.grant_of(now, id)
    }

    fn grant_of(&self, now: Now, id: HoldId) -> Grant {
        let hold = &self.state.holds[id];
        let names = Names::new(hold.slots.iter().map(|slot| self.state.slots[*slot].name.clone()));
        Grant {
            claim: Claim { attempt: hold.attempt, names: names.expect("a hold has names") },
            fence: hold.fence,
            mode: hold.mode,
            ttl: hold.ttl(),
            sent_at: now.moment,
            lease: hold.ttl(),
        }
    }

    fn extend(&mut self, now: Now, id: HoldId) {
        let expires = now.moment + self.state.holds[id].ttl();
        self.state.set_expiry(id, expires);
    }

    /// Renews a grant: its lease counts from `now`.
    pub fn handle_renew(&mut self, now: Now, attempt: &Attempt) -> Renewal {
        self.handle_timeout(now);
        let Some(id) = self.state.hold_of(attempt) else { return Renewal::Lost };
        if let Some(reason) = self.state.revoked.get(&id) {
            return Renewal::Revoked(reason.clone());
        }
        self.extend(now, id);
        Renewal::Renewed
    }

    /// Gives back a grant, or takes an ask out of the line.
    pub fn handle_release(&mut self, now: Now, claim: &Claim) -> Release {
        self.handle_timeout(now);
        if let Some(ticket) = self.state.tickets.get(&claim.attempt).copied() {
            let waiter = self.state.remove_waiter(ticket);
            self.tell(now, &waiter.slots, EventKind::Left, Some(&waiter.ask.holder));
            self.serve(now, waiter.slots);
            return Release::Released;
        }
        let Some(id) = self.state.hold_of(&claim.attempt) else { return Release::AlreadyGone };
        let hold = &self.state.holds[id];
        let (fence, stays, holder, slots) = (hold.fence, hold.stays, hold.holder.clone(), hold.slots.clone());
        self.tell(now, &slots, EventKind::Released { fence }, Some(&holder));
        // Whoever revoked it wants it to be free.
        if stays > now.moment && !self.state.revoked.contains_key(&id) {
            self.state.linger(id);
        } else {
            self.state.remove_hold(id);
            self.serve(now, slots);
        }
        Release::Released
    }

    /// Asks the holders of a lock to give it back: none of their leases is counted anew. A hold that only lingers ends, and a lock that is
    /// only held back is freed.
    pub fn handle_revoke(&mut self, now: Now, name: &LockName, reason: &str) -> Result<Fence> {
        self.handle_timeout(now);
        let fence = self.next_fence(now.wall)?;
        let reason: Arc<str> = reason.into();
        let slot = self.state.slot_of(name);
        self.state.undelay(slot);
        let mut touched = Ids::from_slice(&[slot]);
        for id in self.state.slots[slot].holds.clone() {
            touched.extend(self.state.holds[id].slots.iter().copied().filter(|other| *other != slot));
            if self.state.holds[id].lingering() {
                self.state.remove_hold(id);
            } else {
                self.state.revoked.insert(id, reason.clone());
            }
        }
        // A grant of several names is revoked as a whole.
        touched[1..].sort_unstable_by(|a, b| self.state.slots[*a].name.cmp(&self.state.slots[*b].name));
        touched.dedup();
        self.tell(now, &touched, EventKind::Revoked { fence, reason: reason.as_ref().into() }, None);
        self.serve(now, touched);
        Ok(fence)
    }

    /// A holder that is to stop cannot begin anew.
    fn refuse_revoked(&self, id: HoldId) -> Result<()> {
        match self.state.revoked.get(&id) {
            Some(reason) => Err(Error::Lost(lease::Why::Revoked(reason.clone()).to_string())),
            None => Ok(()),
        }
    }

    /// Takes a lock away from whoever holds it, and lets the fence move on. A lock that is only held back is freed.
    pub fn handle_break(&mut self, now: Now, name: &LockName, reason: &str) -> Result<Fence> {
        self.handle_timeout(now);
        let fence = self.next_fence(now.wall)?;
        let slot = self.state.slot_of(name);
        self.state.undelay(slot);
        let mut others = Ids::new();
        for id in self.state.slots[slot].holds.clone() {
            others.extend(self.end_uncleanly(now.moment, id));
        }
        // A grant of several names is lost as a whole: whoever watches one of the others has to hear of it too.
        others.retain(|other| *other != slot);
        others.sort_unstable_by(|a, b| self.state.slots[*a].name.cmp(&self.state.slots[*b].name));
        others.dedup();
        let mut touched = Ids::from_slice(&[slot]);
        touched.extend(others);
        self.tell(now, &touched, EventKind::Broken { fence, reason: reason.to_owned() }, None);
        self.serve(now, touched);
        Ok(fence)
    }

    /// Removes a hold whose holder did not let go, and holds its names back if it asked for that.
    fn end_uncleanly(&mut self, at: Moment, id: HoldId) -> Ids {
        let hold = self.state.remove_hold(id);
        if hold.lock_delay_ms > 0 && !hold.lingering() {
            let until = at + std::time::Duration::from_millis(hold.lock_delay_ms.into());
            for slot in &hold.slots {
                self.state.delay(*slot, until);
            }
        }
        hold.slots
    }

    /// Does everything that is due: leases end, delays end, patience ends.
    pub fn handle_timeout(&mut self, now: Now) {
        let mut touched = self.end_leases(now);
        while let Some((_, slot)) = self.state.delay_ends.first().copied().filter(|(at, _)| *at <= now.moment)
        {
            self.state.undelay(slot);
            touched.push(slot);
        }
        if !touched.is_empty() {
            self.serve(now, touched);
        }
        while let Some((_, ticket)) = self.state.patience.first().copied().filter(|(at, _)| *at <= now.moment)
        {
            let waiter = self.state.remove_waiter(ticket);
            let busy = self.busy(now, &waiter.ask, &waiter.slots, ticket);
            self.answer(waiter.ask.claim.attempt, Ok(Acquired::Busy(busy)));
            self.tell(now, &waiter.slots, EventKind::Left, Some(&waiter.ask.holder));
            self.serve(now, waiter.slots);
        }
    }

    /// Ends what is due, all of it before anybody is let in: a lease that is over must not count for anything, and
    /// who comes first must not depend on which of several ends is looked at first.
    fn end_leases(&mut self, now: Now) -> Ids {
        let state = &self.state;
        let due = state.expiry.iter().take_while(|(at, _)| *at <= now.moment);
        let mut due: SmallVec<[(Moment, Fence, Attempt, HoldId); 2]> =
            due.map(|(at, id)| (*at, state.holds[*id].fence, state.holds[*id].attempt, *id)).collect();
        // Ids are used again; the order of news among equals is that of the fences.
        due.sort_unstable();
        let mut touched = Ids::new();
        for (at, fence, _, id) in due {
            let hold = &self.state.holds[id];
            let (holder, told) = (hold.holder.clone(), !hold.lingering());
            // The delay counts from the end of the lease, not from the moment at which somebody noticed.
            let slots = self.end_uncleanly(at, id);
            if told {
                self.tell(now, &slots, EventKind::Expired { fence }, Some(&holder));
            }
            touched.extend(slots);
        }
        touched
    }

    /// When [`Table::handle_timeout`] wants to be called next.
    pub fn poll_timeout(&self) -> Option<Moment> {
        let expiry = self.state.expiry.first().map(|(at, _)| *at);
        let delay = self.state.delay_ends.first().map(|(at, _)| *at);
        let patience = self.state.patience.first().map(|(at, _)| *at);
        [expiry, delay, patience].into_iter().flatten().min()
    }

    /// What is to be passed on, oldest first.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// How many grants there are, lingering ones included.
    pub fn held(&self) -> usize {
        self.state.holds.len()
    }

    /// How many asks stand in line.
    pub fn waiting(&self) -> usize {
        self.state.waiters.len()
    }

    /// One lock as it is at `now`.
    pub fn inspect(&self, now: Moment, name: &LockName) -> Option<LockView> {
        self.state.by_name.get(name).and_then(|slot| self.view(now, *slot))
    }

    /// The locks whose names begin with `prefix`, in order, a page at a time.
    pub fn list(&self, now: Moment, prefix: &str, page: &Page) -> LockPage {
        let from = match &page.after {
            Some(after) if after.as_str() >= prefix => Bound::Excluded(after.as_str()),
            _ => Bound::Included(prefix),
        };
        let mut found = self
            .state
            .by_name
            .range::<str, _>((from, Bound::Unbounded))
            .take_while(|(name, _)| name.as_str().starts_with(prefix))
            .filter_map(|(_, slot)| self.view(now, *slot));
        let locks: Vec<LockView> = found.by_ref().take(page.size()).collect();
        let next = found.next().and(locks.last()).map(|last| last.name.clone());
        LockPage { locks, next }
    }

    fn view(&self, now: Moment, slot: SlotId) -> Option<LockView> {
        let Self { state, .. } = self;
        let live = |id: &&HoldId| state.holds[**id].expires > now;
        let held: Vec<_> =
            state.slots[slot].holds.iter().filter(live).map(|id| state.view_hold(now, *id)).collect();
        let line = state.lines.get(&slot);
        let delayed_ms =
            state.delays.get(&slot).filter(|until| **until > now).map(|until| ms64(until.since(now)));
        let view = LockView {
            name: state.slots[slot].name.clone(),
            held,
            line: line.into_iter().flatten().take(LockView::LINE).map(|t| state.waiters[t].view()).collect(),
            waiting: line.map_or(0, |line| line.len()),
            delayed_ms,
        };
        (!view.held.is_empty() || view.waiting > 0 || view.delayed_ms.is_some()).then_some(view)
    }

    /// Who is in the way of an ask at this place in its lines.
    fn busy(&self, now: Now, ask: &Ask, slots: &Ids, place: Ticket) -> Busy {
        let state = &self.state;
        let in_the_way = |slot: &&SlotId| {
            state.front(**slot).is_some_and(|first| first < place)
                || state.delays.contains_key(*slot)
                || judge(ask.owner, ask.mode, state.stakes(**slot)) == Verdict::Blocked
        };
        let slot = *slots.iter().find(in_the_way).unwrap_or(&slots[0]);
        let holds = &self.state.slots[slot].holds;
        Busy {
            name: self.state.slots[slot].name.clone(),
            held: holds.iter().take(LockView::BUSY).map(|id| self.state.view_hold(now.moment, *id)).collect(),
            waiting: self.state.lines.get(&slot).map_or(0, |line| line.len()),
        }
    }

    fn answer(&mut self, attempt: Attempt, answer: Result<Acquired>) {
        self.effects.push_back(Effect::Answer(attempt, answer));
    }

    fn tell(&mut self, now: Now, slots: &[SlotId], kind: EventKind, holder: Option<&Holder>) {
        if !self.watched {
            return;
        }
        for slot in slots {
            let name = self.state.slots[*slot].name.clone();
            let event = Event { at: now.wall, name, kind: kind.clone(), holder: holder.cloned() };
            self.effects.push_back(Effect::Event(event));
        }
    }
}
