//! Standing in line: strictly first come, first served, for every name of an ask.

use super::*;
use crate::deadlock::{self, Obstacle};
use crate::{Mode, Owner};

impl Table {
    pub(super) fn enqueue(&mut self, now: Now, ask: Ask, slots: Ids) -> Result<()> {
        if let Some(owner) = ask.owner {
            self.refuse_self_wait(owner, &ask)?;
            let first = self.obstacles_of(&ask, &slots, Ticket::MAX);
            let all = |who| self.obstacles(who);
            if let Some(names) = deadlock::cycle(owner, first, all) {
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

    /// An earlier ask of the same owner stands in line for one of these names. Once that is granted, this one either
    /// re-enters, or would wait for its own owner for ever.
    fn refuse_self_wait(&self, owner: Owner, ask: &Ask) -> Result<()> {
        let Some(estate) = self.state.owners.get(&owner) else { return Ok(()) };
        for ticket in &estate.tickets {
            let earlier = &self.state.waiters[ticket].ask;
            let theirs = earlier.claim.names.as_slice();
            let shared: Vec<LockName> =
                ask.claim.names.iter().filter(|name| theirs.binary_search(name).is_ok()).cloned().collect();
            let reenters = shared.len() == ask.claim.names.count()
                && !matches!((earlier.mode, ask.mode), (Mode::Shared, Mode::Exclusive | Mode::Permit(_)))
                && !matches!((earlier.mode, ask.mode), (Mode::Permit(_), Mode::Exclusive | Mode::Shared));
            if !shared.is_empty() && !reenters {
                return Err(Error::Deadlock(shared));
            }
        }
        Ok(())
    }

    fn obstacles(&self, owner: Owner) -> Vec<Obstacle> {
        let Some(estate) = self.state.owners.get(&owner) else { return Vec::new() };
        let waits = estate.tickets.iter().map(|ticket| (*ticket, &self.state.waiters[ticket]));
        waits.flat_map(|(ticket, waiter)| self.obstacles_of(&waiter.ask, &waiter.slots, ticket)).collect()
    }

    fn obstacles_of(&self, ask: &Ask, slots: &Ids, place: Ticket) -> Vec<Obstacle> {
        let mut found = Vec::new();
        for slot in slots {
            let name = &self.state.slots[*slot].name;
            let not_me = |owner: &Option<Owner>| owner.is_none() || *owner != ask.owner;
            if judge(ask.owner, ask.mode, self.state.stakes(*slot)) == Verdict::Blocked {
                let stakes = || self.state.stakes(*slot);
                let any = matches!(ask.mode, Mode::Permit(_))
                    && stakes().all(|stake| matches!(stake.mode, Mode::Permit(_)));
                let owners = stakes().map(|stake| stake.owner).filter(not_me).collect();
                found.push(Obstacle { name: name.clone(), owners, any });
            }
            let ahead = self.state.lines.get(slot).into_iter().flat_map(|line| line.range(..place));
            let owners = ahead.map(|ticket| self.state.waiters[ticket].ask.owner).filter(not_me).collect();
            found.push(Obstacle { name: name.clone(), owners, any: false });
        }
        found
    }

    /// Serves the lines of these names until nobody at a front can be served, then forgets what is empty.
    pub(super) fn serve(&mut self, now: Now, slots: Ids) {
        let mut work: VecDeque<SlotId> = slots.iter().copied().collect();
        let mut touched = slots;
        while let Some(slot) = work.pop_front() {
            while let Some(ticket) = self.state.front(slot) {
                let Some(served) = self.serve_one(now, ticket) else { break };
                // Its other lines have a new front now.
                for other in served {
                    if other != slot {
                        work.push_back(other);
                        touched.push(other);
                    }
                }
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
