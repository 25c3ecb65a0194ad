//! Standing in line: strictly first come, first served, for every name of an ask.

use std::collections::{BTreeSet, HashMap};

use super::*;
use crate::Owner;
use crate::deadlock::{self, Want};
use crate::rules::{Stake, refuse_self_wait};

impl Table {
    pub(super) fn enqueue(&mut self, now: Now, ask: Ask, slots: Ids) -> Result<()> {
        if let Some(owner) = ask.owner {
            let tickets = self.state.owners.get(&owner).into_iter().flat_map(|estate| &estate.tickets);
            refuse_self_wait(tickets.map(|ticket| &self.state.waiters[ticket].ask), &ask)?;
            if let Some(names) = self.circle(owner, &ask, &slots) {
                return Err(Error::Deadlock(names));
            }
        }
        self.ticket += 1;
        let until = match ask.wait {
            Wait::No => now.moment,
            Wait::For(d) => now.moment + d,
            Wait::Forever => Moment::NEVER,
        };
        self.tell(now, &slots, EventKind::Waiting, Some(&ask.holder));
        self.state.add_waiter(self.ticket, Waiter { ask, slots, until, since: now.wall });
        Ok(())
    }

    /// Whether this ask would wait for ever at the end of its lines. Looks only at what can be in its way, however far
    /// off.
    fn circle(&self, owner: Owner, ask: &Ask, slots: &Ids) -> Option<Vec<LockName>> {
        let State { owners, lines, waiters, .. } = &self.state;
        // Who has nothing and wants nothing else keeps nobody waiting. So it is with nearly every ask.
        owners.get(&owner)?;
        let waits = |who: &Owner| owners.get(who).into_iter().flat_map(|estate| &estate.tickets);
        let mut held = HashMap::new();
        let mut line = BTreeSet::new();
        let mut open = Vec::new();
        let mut next = Some((slots, Ticket::MAX));
        while let Some((slots, place)) = next {
            for slot in slots {
                // Those further ahead are found from the one just ahead.
                open.extend(lines.get(slot).and_then(|line| line.range(..place).next_back()));
                held.entry(*slot).or_insert_with(|| {
                    let counts = |who: &Owner| *who == owner || waits(who).next().is_some();
                    let stakes =
                        self.state.stakes(*slot).filter(|stake| stake.owner.as_ref().is_some_and(counts));
                    let stakes: Vec<Stake> = stakes.collect();
                    open.extend(stakes.iter().filter_map(|stake| stake.owner.as_ref()).flat_map(waits));
                    stakes
                });
            }
            next = std::iter::from_fn(|| open.pop()).find(|ticket| line.insert(*ticket)).map(|ticket| {
                let waiter = &waiters[&ticket];
                open.extend(waiter.ask.owner.iter().flat_map(waits));
                (&waiter.slots, ticket)
            });
        }
        let want = |ask: &Ask, slots: &Ids| Want { owner: ask.owner, mode: ask.mode, names: slots.to_vec() };
        let mut wants: Vec<_> = line.iter().map(|t| want(&waiters[t].ask, &waiters[t].slots)).collect();
        wants.push(want(ask, slots));
        let names = deadlock::circle(held, wants)?;
        Some(names.into_iter().map(|slot| self.state.slots[slot].name.clone()).collect())
    }

    /// Serves the lines of these names, whoever came first first, until nobody at a front can be served; then forgets
    /// what is empty.
    pub(super) fn serve(&mut self, now: Now, slots: Ids) {
        let mut fronts: BTreeSet<Ticket> = slots.iter().filter_map(|slot| self.state.front(*slot)).collect();
        let mut touched = slots;
        while let Some(ticket) = fronts.pop_first() {
            if let Some(served) = self.serve_one(now, ticket) {
                // Its lines have a new front now.
                fronts.extend(served.iter().filter_map(|slot| self.state.front(*slot)));
                touched.extend(served);
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for slot in touched {
            self.state.tidy(slot);
        }
    }

    fn serve_one(&mut self, now: Now, ticket: Ticket) -> Option<Ids> {
        let waiter = &self.state.waiters[&ticket];
        let fence = match self.verdict(&waiter.ask, &waiter.slots, Some(ticket)) {
            Ok(Verdict::Free) => self.next_fence(now.wall),
            Ok(Verdict::Reenter(fence)) => Ok(fence),
            Ok(Verdict::Blocked | Verdict::Upgrade) => return None,
            Err(error) => Err(error),
        };
        let waiter = self.state.remove_waiter(ticket);
        let Waiter { ask, slots, .. } = waiter;
        let attempt = ask.claim.attempt;
        match fence {
            Ok(fence) => {
                let grant = self.admit(now, &ask, &slots, fence);
                self.answer(attempt, Ok(Acquired::Granted(grant)));
                if let Some(owner) = ask.owner {
                    self.serve_owner(now, owner, &slots);
                }
            }
            Err(error) => self.answer(attempt, Err(error)),
        }
        Some(slots)
    }

    /// Other asks of an owner that just got these names re-enter past the line.
    fn serve_owner(&mut self, now: Now, owner: Owner, slots: &Ids) {
        let Some(estate) = self.state.owners.get(&owner) else { return };
        for ticket in estate.tickets.clone() {
            let waiter = &self.state.waiters[&ticket];
            if waiter.slots.iter().any(|slot| !slots.contains(slot)) {
                continue;
            }
            if let Ok(Verdict::Reenter(fence)) = self.verdict(&waiter.ask, &waiter.slots, Some(ticket)) {
                let waiter = self.state.remove_waiter(ticket);
                let grant = self.admit(now, &waiter.ask, &waiter.slots, fence);
                self.answer(grant.claim.attempt, Ok(Acquired::Granted(grant)));
            }
        }
    }
}
