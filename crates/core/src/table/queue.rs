//! The queues: strictly first come, first served, for every name of a request.

use std::collections::{BTreeSet, HashMap};

use super::*;
use crate::Owner;
use crate::admission::{ActiveHold, refuse_self_wait};
use crate::deadlock::{self, QueuedRequest};

impl Table {
    pub(super) fn enqueue(&mut self, now: Now, request: LockRequest, slots: Ids) -> Result<()> {
        if let Some(owner) = request.owner {
            let tickets =
                self.state.owners.get(&owner).into_iter().flat_map(|owner_state| &owner_state.tickets);
            refuse_self_wait(tickets.map(|ticket| &self.state.waiters[ticket].request), &request)?;
            if let Some(names) = self.find_cycle(owner, &request, &slots) {
                return Err(Error::Deadlock(names));
            }
        }
        self.ticket += 1;
        let until = request.wait.deadline(now.moment);
        self.emit(now, &slots, EventKind::Waiting, Some(&request.holder));
        self.state.add_waiter(self.ticket, Waiter { request, slots, until, since: now.wall });
        Ok(())
    }

    /// Whether this request would wait for ever at the end of its queues. Looks only at what can block it, directly or not.
    fn find_cycle(&self, owner: Owner, request: &LockRequest, slots: &Ids) -> Option<Vec<LockName>> {
        let TableState { owners, queues, waiters, .. } = &self.state;
        // An owner without holds and other requests blocks nothing. Nearly every request is of such an owner.
        owners.get(&owner)?;
        let waits = |who: &Owner| owners.get(who).into_iter().flat_map(|owner_state| &owner_state.tickets);
        let mut held = HashMap::new();
        let mut queue = BTreeSet::new();
        let mut open = Vec::new();
        let mut next = Some((slots, Ticket::MAX));
        while let Some((slots, place)) = next {
            for slot in slots {
                // The search reaches requests further ahead from the one just ahead.
                open.extend(queues.get(slot).and_then(|queue| queue.range(..place).next_back()));
                held.entry(*slot).or_insert_with(|| {
                    let counts = |who: &Owner| *who == owner || waits(who).next().is_some();
                    let active_holds = self
                        .state
                        .active_holds(*slot)
                        .filter(|active_hold| active_hold.owner.as_ref().is_some_and(counts));
                    let active_holds: Vec<ActiveHold> = active_holds.collect();
                    open.extend(
                        active_holds
                            .iter()
                            .filter_map(|active_hold| active_hold.owner.as_ref())
                            .flat_map(waits),
                    );
                    active_holds
                });
            }
            next = std::iter::from_fn(|| open.pop()).find(|ticket| queue.insert(*ticket)).map(|ticket| {
                let waiter = &waiters[&ticket];
                open.extend(waiter.request.owner.iter().flat_map(waits));
                (&waiter.slots, ticket)
            });
        }
        let want = |request: &LockRequest, slots: &Ids| QueuedRequest {
            owner: request.owner,
            mode: request.mode,
            names: slots.to_vec(),
        };
        let mut wants: Vec<_> = queue.iter().map(|t| want(&waiters[t].request, &waiters[t].slots)).collect();
        wants.push(want(request, slots));
        let names = deadlock::find_cycle(held, wants)?;
        Some(names.into_iter().map(|slot| self.state.slots[slot].name.clone()).collect())
    }

    /// Grants the waiters of these names in order of arrival, until no request at the front of a queue can be granted; then removes empty
    /// slots.
    pub(super) fn grant_waiters(&mut self, now: Now, slots: Ids) {
        let mut fronts: BTreeSet<Ticket> = slots.iter().filter_map(|slot| self.state.front(*slot)).collect();
        let mut touched = slots;
        while let Some(ticket) = fronts.pop_first() {
            if let Some(served) = self.grant_waiter(now, ticket) {
                // Its queues have a new front now.
                fronts.extend(served.iter().filter_map(|slot| self.state.front(*slot)));
                touched.extend(served);
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for slot in touched {
            self.state.sweep(slot);
        }
    }

    fn grant_waiter(&mut self, now: Now, ticket: Ticket) -> Option<Ids> {
        let waiter = &self.state.waiters[&ticket];
        let fence = match self.verdict(&waiter.request, &waiter.slots, Some(ticket)) {
            Ok(Admission::Free) => self.next_fence(now.wall),
            Ok(Admission::Reenter(fence)) => Ok(fence),
            Ok(Admission::Blocked | Admission::Upgrade) => return None,
            Err(error) => Err(error),
        };
        let waiter = self.state.remove_waiter(ticket);
        let Waiter { request, slots, .. } = waiter;
        let attempt = request.key.attempt;
        match fence {
            Ok(fence) => {
                let grant = self.admit(now, &request, &slots, fence);
                self.answer(attempt, Ok(AcquireOutcome::Granted(grant)));
                if let Some(owner) = request.owner {
                    self.grant_owner(now, owner, &slots);
                }
            }
            Err(error) => self.answer(attempt, Err(error)),
        }
        Some(slots)
    }

    /// Grants other requests of an owner that just got these names, past the queue.
    fn grant_owner(&mut self, now: Now, owner: Owner, slots: &Ids) {
        let Some(owner_state) = self.state.owners.get(&owner) else { return };
        for ticket in owner_state.tickets.clone() {
            let waiter = &self.state.waiters[&ticket];
            if waiter.slots.iter().any(|slot| !slots.contains(slot)) {
                continue;
            }
            if let Ok(Admission::Reenter(fence)) = self.verdict(&waiter.request, &waiter.slots, Some(ticket))
            {
                let waiter = self.state.remove_waiter(ticket);
                let grant = self.admit(now, &waiter.request, &waiter.slots, fence);
                self.answer(grant.key.attempt, Ok(AcquireOutcome::Granted(grant)));
            }
        }
    }
}
