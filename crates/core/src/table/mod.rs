//! The lock table: the reference for every store, a state machine without clock, random source or IO.
//!
//! It takes a request and the time, and answers at once or puts the request in the queue; [`Table::poll_effect`] returns what happens to
//! queued requests later.
//!
//! ```
//! # use lockkeeper_core::{*, table::*};
//! # use std::{sync::Arc, time::Duration};
//! let mut table = Table::default();
//! let me = Arc::new(Holder::new("host", 1, None)?);
//! let request = LockRequest::new(Attempt::from_bytes([7; 16]), LockName::new("orders/42")?, Duration::from_secs(30), me);
//! let now = Now { moment: BootInstant::from_nanos(0), wall: WallTime::from_micros(1_000) };
//! let Answer::Granted(grant) = table.handle_request(now, request)? else { panic!("busy") };
//! assert_eq!(grant.fence.get(), 1_000);
//! assert_eq!(table.handle_release(now, &grant.key), ReleaseOutcome::Released);
//! # Ok::<(), Error>(())
//! ```

mod queue;
mod slab;
mod state;

use std::collections::VecDeque;
use std::ops::Bound;
use std::sync::Arc;

use crate::admission::{Admission, evaluate, evaluate_all};
use crate::lease;
use crate::{
    AcquireOutcome, Attempt, BootInstant, Busy, Error, Event, EventKind, Fence, Grant, Holder, LockName,
    LockPage, LockRequest, LockView, Names, Page, ReleaseOutcome, RenewOutcome, RequestKey, Result, Wait,
    WallTime,
};
use smallvec::SmallVec;
use state::{Hold, HoldId, Ids, SlotId, TableState, Ticket, Waiter, ms64};

/// The present time: the boot instant decides, the wall clock is the floor of fences and for display.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// On the boot-time clock.
    pub moment: BootInstant,
    /// On the wall clock.
    pub wall: WallTime,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The table granted it.
    Granted(Grant),
    /// Another request holds it, and this one does not wait.
    Busy(Busy),
    /// The request is queued; its outcome comes as an effect.
    Waiting,
}

/// An effect that the driver has to report.
#[derive(Clone, Debug)]
pub enum TableEffect {
    /// A queued request was granted, reached its wait deadline, or failed.
    Answer(Attempt, Result<AcquireOutcome>),
    /// Something happened to a lock; only while [`Table::set_watched`].
    Event(Event),
}

/// The lock table. See the [module](self).
#[derive(Clone, Debug, Default)]
pub struct Table {
    state: TableState,
    fence: Option<Fence>,
    ticket: Ticket,
    watched: bool,
    effects: VecDeque<TableEffect>,
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
    pub fn next_fence(&mut self, wall: WallTime) -> Result<Fence> {
        let fence = Fence::after(self.fence, wall)?;
        self.fence = Some(fence);
        Ok(fence)
    }

    /// Whether to record events. Without watchers the table records none.
    pub fn set_watched(&mut self, watched: bool) {
        self.watched = watched;
    }

    /// Handles a request. The same attempt sent again is the same request: a grant keeps its fence and its lease counts anew, a queue entry
    /// keeps its position.
    pub fn handle_request(&mut self, now: Now, request: LockRequest) -> Result<Answer> {
        request.check()?;
        self.handle_timeout(now);
        if let Some(id) = self.state.hold_of(&request.key.attempt) {
            self.refuse_revoked(id)?;
            self.extend(now, id);
            return Ok(Answer::Granted(self.grant_of(now, id)));
        }
        if self.state.tickets.contains_key(&request.key.attempt) {
            return Ok(Answer::Waiting);
        }
        let slots: Ids = request.key.names.iter().map(|name| self.state.slot_of(name)).collect();
        let answer = self.decide(now, request, &slots);
        for slot in slots {
            self.state.sweep(slot);
        }
        answer
    }

    fn decide(&mut self, now: Now, request: LockRequest, slots: &Ids) -> Result<Answer> {
        match self.verdict(&request, slots, None)? {
            Admission::Free => {
                let fence = self.next_fence(now.wall)?;
                Ok(Answer::Granted(self.admit(now, &request, slots, fence)))
            }
            Admission::Reenter(fence) => Ok(Answer::Granted(self.admit(now, &request, slots, fence))),
            Admission::Upgrade => Err(Error::Deadlock(request.key.names.iter().cloned().collect())),
            Admission::Blocked if request.wait == Wait::No => {
                Ok(Answer::Busy(self.busy(now, &request, slots, Ticket::MAX)))
            }
            Admission::Blocked => self.enqueue(now, request, slots.clone()).map(|()| Answer::Waiting),
        }
    }

    /// The decision of the admission rule about all names of a request. `place` is its ticket if it is queued already.
    fn verdict(&self, request: &LockRequest, slots: &Ids, place: Option<Ticket>) -> Result<Admission> {
        let state = &self.state;
        let each = slots.iter().map(|slot| {
            let ahead = |first| place.is_none_or(|place| first < place);
            Ok(match evaluate(request.owner, request.mode, state.active_holds(*slot)) {
                Admission::Free if state.delays.contains_key(slot) => Admission::Blocked,
                Admission::Free if state.front(*slot).is_some_and(ahead) => Admission::Blocked,
                verdict => verdict,
            })
        });
        let verdict = evaluate_all(request, place.is_some(), each)?;
        if let Admission::Reenter(fence) = verdict {
            let holds = slots.iter().flat_map(|slot| &state.slots[*slot].holds);
            let own = holds.filter(|id| state.holds[**id].fence == fence);
            own.copied().try_for_each(|id| self.refuse_revoked(id))?;
        }
        Ok(verdict)
    }

    fn admit(&mut self, now: Now, request: &LockRequest, slots: &Ids, fence: Fence) -> Grant {
        let id = self.state.add_hold(Hold::new(request, slots.clone(), fence, now));
        self.emit(now, slots, EventKind::Granted { fence }, Some(&request.holder));
        self.grant_of(now, id)
    }

    fn grant_of(&self, now: Now, id: HoldId) -> Grant {
        let hold = &self.state.holds[id];
        let names = Names::new(hold.slots.iter().map(|slot| self.state.slots[*slot].name.clone()));
        Grant {
            key: RequestKey { attempt: hold.attempt, names: names.expect("a hold has names") },
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
    pub fn handle_renew(&mut self, now: Now, attempt: &Attempt) -> RenewOutcome {
        self.handle_timeout(now);
        let Some(id) = self.state.hold_of(attempt) else { return RenewOutcome::Lost };
        if let Some(reason) = self.state.revoked.get(&id) {
            return RenewOutcome::Revoked(reason.clone());
        }
        self.extend(now, id);
        RenewOutcome::Renewed
    }

    /// Releases a grant, or removes a request from the queue.
    pub fn handle_release(&mut self, now: Now, key: &RequestKey) -> ReleaseOutcome {
        self.handle_timeout(now);
        if let Some(ticket) = self.state.tickets.get(&key.attempt).copied() {
            let waiter = self.state.remove_waiter(ticket);
            self.emit(now, &waiter.slots, EventKind::Left, Some(&waiter.request.holder));
            self.grant_waiters(now, waiter.slots);
            return ReleaseOutcome::Released;
        }
        let Some(id) = self.state.hold_of(&key.attempt) else { return ReleaseOutcome::AlreadyGone };
        let hold = &self.state.holds[id];
        let (fence, stays, holder, slots) = (hold.fence, hold.stays, hold.holder.clone(), hold.slots.clone());
        self.emit(now, &slots, EventKind::Released { fence }, Some(&holder));
        // The operator that revoked it wants it to be free.
        if stays > now.moment && !self.state.revoked.contains_key(&id) {
            self.state.linger(id);
        } else {
            self.state.remove_hold(id);
            self.grant_waiters(now, slots);
        }
        ReleaseOutcome::Released
    }

    /// Asks the holders of a lock to release it: the table renews none of their leases. It ends a hold that only lingers, and frees a lock that
    /// only a lock-delay keeps.
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
        self.emit(now, &touched, EventKind::Revoked { fence, reason: reason.as_ref().into() }, None);
        self.grant_waiters(now, touched);
        Ok(fence)
    }

    /// A holder that is to stop cannot begin anew.
    fn refuse_revoked(&self, id: HoldId) -> Result<()> {
        match self.state.revoked.get(&id) {
            Some(reason) => Err(Error::Lost(lease::LossReason::Revoked(reason.clone()).to_string())),
            None => Ok(()),
        }
    }

    /// Takes a lock away from its holders, and raises the fence. Frees a lock that only a lock-delay keeps.
    pub fn handle_break(&mut self, now: Now, name: &LockName, reason: &str) -> Result<Fence> {
        self.handle_timeout(now);
        let fence = self.next_fence(now.wall)?;
        let slot = self.state.slot_of(name);
        self.state.undelay(slot);
        let mut others = Ids::new();
        for id in self.state.slots[slot].holds.clone() {
            others.extend(self.end_uncleanly(now.moment, id));
        }
        // A grant of several names is lost as a whole: watchers of its other names need the event too.
        others.retain(|other| *other != slot);
        others.sort_unstable_by(|a, b| self.state.slots[*a].name.cmp(&self.state.slots[*b].name));
        others.dedup();
        let mut touched = Ids::from_slice(&[slot]);
        touched.extend(others);
        self.emit(now, &touched, EventKind::Broken { fence, reason: reason.to_owned() }, None);
        self.grant_waiters(now, touched);
        Ok(fence)
    }

    /// Removes a hold that its holder did not release, and starts its lock-delay.
    fn end_uncleanly(&mut self, at: BootInstant, id: HoldId) -> Ids {
        let hold = self.state.remove_hold(id);
        if hold.lock_delay_ms > 0 && !hold.lingering() {
            let until = at + std::time::Duration::from_millis(hold.lock_delay_ms.into());
            for slot in &hold.slots {
                self.state.delay(*slot, until);
            }
        }
        hold.slots
    }

    /// Does everything that is due: ends leases, lock-delays and waits.
    pub fn handle_timeout(&mut self, now: Now) {
        let mut touched = self.end_leases(now);
        while let Some((_, slot)) = self.state.delay_ends.first().copied().filter(|(at, _)| *at <= now.moment)
        {
            self.state.undelay(slot);
            touched.push(slot);
        }
        if !touched.is_empty() {
            self.grant_waiters(now, touched);
        }
        while let Some((_, ticket)) =
            self.state.wait_deadlines.first().copied().filter(|(at, _)| *at <= now.moment)
        {
            let waiter = self.state.remove_waiter(ticket);
            let busy = self.busy(now, &waiter.request, &waiter.slots, ticket);
            self.answer(waiter.request.key.attempt, Ok(AcquireOutcome::Busy(busy)));
            self.emit(now, &waiter.slots, EventKind::Left, Some(&waiter.request.holder));
            self.grant_waiters(now, waiter.slots);
        }
    }

    /// Ends everything that is due before it grants anything: an ended lease must not block a request, and the order of grants must not depend
    /// on the order of the ends.
    fn end_leases(&mut self, now: Now) -> Ids {
        let state = &self.state;
        let due = state.expiry.iter().take_while(|(at, _)| *at <= now.moment);
        let mut due: SmallVec<[(BootInstant, Fence, Attempt, HoldId); 2]> =
            due.map(|(at, id)| (*at, state.holds[*id].fence, state.holds[*id].attempt, *id)).collect();
        // Ids are reused; events of the same instant are ordered by fence.
        due.sort_unstable();
        let mut touched = Ids::new();
        for (at, fence, _, id) in due {
            let hold = &self.state.holds[id];
            let (holder, reported) = (hold.holder.clone(), !hold.lingering());
            // The delay counts from the end of the lease, not from the moment at which the table noticed it.
            let slots = self.end_uncleanly(at, id);
            if reported {
                self.emit(now, &slots, EventKind::Expired { fence }, Some(&holder));
            }
            touched.extend(slots);
        }
        touched
    }

    /// When [`Table::handle_timeout`] wants to be called next.
    pub fn poll_timeout(&self) -> Option<BootInstant> {
        let expiry = self.state.expiry.first().map(|(at, _)| *at);
        let delay = self.state.delay_ends.first().map(|(at, _)| *at);
        let wait_deadlines = self.state.wait_deadlines.first().map(|(at, _)| *at);
        [expiry, delay, wait_deadlines].into_iter().flatten().min()
    }

    /// The next effect to report, oldest first.
    pub fn poll_effect(&mut self) -> Option<TableEffect> {
        self.effects.pop_front()
    }

    /// How many grants there are, lingering ones included.
    pub fn held(&self) -> usize {
        self.state.holds.len()
    }

    /// How many requests are queued.
    pub fn waiting(&self) -> usize {
        self.state.waiters.len()
    }

    /// One lock as it is at `now`.
    pub fn inspect(&self, now: BootInstant, name: &LockName) -> Option<LockView> {
        self.state.by_name.get(name).and_then(|slot| self.view(now, *slot))
    }

    /// The locks whose names begin with `prefix`, in order, a page at a time.
    pub fn list(&self, now: BootInstant, prefix: &str, page: &Page) -> LockPage {
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

    fn view(&self, now: BootInstant, slot: SlotId) -> Option<LockView> {
        let Self { state, .. } = self;
        let live = |id: &&HoldId| state.holds[**id].expires > now;
        let held: Vec<_> =
            state.slots[slot].holds.iter().filter(live).map(|id| state.view_hold(now, *id)).collect();
        let queue = state.queues.get(&slot);
        let delayed_ms =
            state.delays.get(&slot).filter(|until| **until > now).map(|until| ms64(until.since(now)));
        let view = LockView {
            name: state.slots[slot].name.clone(),
            held,
            queue: queue
                .into_iter()
                .flatten()
                .take(LockView::QUEUE_SHOWN)
                .map(|t| state.waiters[t].view())
                .collect(),
            waiting: queue.map_or(0, |queue| queue.len()),
            delayed_ms,
        };
        (!view.held.is_empty() || view.waiting > 0 || view.delayed_ms.is_some()).then_some(view)
    }

    /// Which holders block a request at this position in its queues.
    fn busy(&self, now: Now, request: &LockRequest, slots: &Ids, place: Ticket) -> Busy {
        let state = &self.state;
        let in_the_way = |slot: &&SlotId| {
            state.front(**slot).is_some_and(|first| first < place)
                || state.delays.contains_key(*slot)
                || evaluate(request.owner, request.mode, state.active_holds(**slot)) == Admission::Blocked
        };
        let slot = *slots.iter().find(in_the_way).unwrap_or(&slots[0]);
        let holds = &self.state.slots[slot].holds;
        Busy {
            name: self.state.slots[slot].name.clone(),
            held: holds.iter().take(LockView::BUSY).map(|id| self.state.view_hold(now.moment, *id)).collect(),
            waiting: self.state.queues.get(&slot).map_or(0, |queue| queue.len()),
        }
    }

    fn answer(&mut self, attempt: Attempt, answer: Result<AcquireOutcome>) {
        self.effects.push_back(TableEffect::Answer(attempt, answer));
    }

    fn emit(&mut self, now: Now, slots: &[SlotId], kind: EventKind, holder: Option<&Holder>) {
        if !self.watched {
            return;
        }
        for slot in slots {
            let name = self.state.slots[*slot].name.clone();
            let event = Event { at: now.wall, name, kind: kind.clone(), holder: holder.cloned() };
            self.effects.push_back(TableEffect::Event(event));
        }
    }
}
