//! What the table remembers, kept small: a million held locks cost less than 250 bytes each beyond their names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;
use std::hash::BuildHasher;

use super::Now;
use super::slab::Slab;
use crate::rules::Stake;
use crate::{Ask, Attempt, Fence, Held, Holder, LockName, Mode, Moment, Owner, Queued, Wall};

pub(super) type Ids = SmallVec<[u32; 4]>;
pub(super) type SlotId = u32;
pub(super) type HoldId = u32;
/// The place of an ask in all its lines: smaller came earlier.
pub(super) type Ticket = u64;

/// One name that is held, waited for or held back.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub name: LockName,
    /// Oldest first; re-entrant holds of one owner beside each other.
    pub holds: Ids,
}

/// One grant.
#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub attempt: Attempt,
    pub owner: Option<Box<Owner>>,
    pub slots: Ids,
    pub fence: Fence,
    /// The end of its minimum hold.
    pub stays: Moment,
    pub since: Wall,
    pub expires: Moment,
    pub mode: Mode,
    /// Zero once it lingers: nothing can be renewed then, and a flag of its own would cost eight bytes.
    ttl_ms: u32,
    pub lock_delay_ms: u32,
    pub holder: Arc<Holder>,
}

impl Hold {
    pub fn new(ask: &Ask, slots: Ids, fence: Fence, now: Now) -> Self {
        Hold {
            attempt: ask.claim.attempt,
            owner: ask.owner.map(Box::new),
            slots,
            fence,
            stays: now.moment + ask.min_hold,
            since: now.wall,
            expires: now.moment + ask.ttl,
            mode: ask.mode,
            ttl_ms: ms32(ask.ttl),
            lock_delay_ms: ms32(ask.lock_delay),
            holder: ask.holder.clone(),
        }
    }

    /// Released, and kept only for the rest of its minimum hold: it cannot be renewed, released or re-entered.
    pub fn lingering(&self) -> bool {
        self.ttl_ms == 0
    }

    pub fn stake(&self) -> Stake {
        Stake { owner: self.owner.as_deref().copied(), mode: self.mode, fence: self.fence }
    }

    pub fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms.into())
    }

    fn view(&self, now: Moment) -> Held {
        Held {
            holder: (*self.holder).clone(),
            fence: self.fence,
            mode: self.mode,
            since: self.since,
            expires_in_ms: ms64(self.expires.since(now)),
            lingering: self.lingering(),
            revoked: None,
        }
    }
}

/// One ask in line.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub ask: Ask,
    pub slots: Ids,
    pub until: Moment,
    pub since: Wall,
}

impl Waiter {
    pub fn view(&self) -> Queued {
        Queued { holder: (*self.ask.holder).clone(), mode: self.ask.mode, since: self.since }
    }
}

/// What an explicit owner has and wants.
#[derive(Clone, Debug, Default)]
pub(super) struct Estate {
    pub holds: BTreeSet<HoldId>,
    pub tickets: BTreeSet<Ticket>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub slots: Slab<Slot>,
    pub by_name: BTreeMap<LockName, SlotId>,
    pub holds: Slab<Hold>,
    by_attempt: HashTable<HoldId>,
    hasher: DefaultHashBuilder,
    pub expiry: BTreeSet<(Moment, HoldId)>,

    pub lines: HashMap<SlotId, BTreeSet<Ticket>>,
    pub waiters: BTreeMap<Ticket, Waiter>,
    pub tickets: HashMap<Attempt, Ticket>,
    pub patience: BTreeSet<(Moment, Ticket)>,

    pub delays: HashMap<SlotId, Moment>,
    pub delay_ends: BTreeSet<(Moment, SlotId)>,

    pub owners: HashMap<Owner, Estate>,
    /// The holds that are to be given back, and why. Few, so they cost the others nothing.
    pub revoked: HashMap<HoldId, Arc<str>>,
}

impl State {
    pub fn slot_of(&mut self, name: &LockName) -> SlotId {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = self.slots.insert(Slot { name: name.clone(), holds: Ids::new() });
        self.by_name.insert(name.clone(), id);
        id
    }

    /// Forgets a slot that nobody holds, waits for or is kept from.
    pub fn tidy(&mut self, slot: SlotId) {
        if self.lines.get(&slot).is_some_and(BTreeSet::is_empty) {
            self.lines.remove(&slot);
        }
        if self.slots[slot].holds.is_empty()
            && !self.lines.contains_key(&slot)
            && !self.delays.contains_key(&slot)
        {
            let slot = self.slots.remove(slot);
            self.by_name.remove(&slot.name);
        }
    }

    pub fn hold_of(&self, attempt: &Attempt) -> Option<HoldId> {
        let hash = self.hasher.hash_one(attempt);
        self.by_attempt.find(hash, |id| self.holds[*id].attempt == *attempt).copied()
    }

    pub fn stakes(&self, slot: SlotId) -> impl Iterator<Item = Stake> + '_ {
        self.slots[slot].holds.iter().map(|id| self.holds[*id].stake())
    }

    /// The first in line, if anybody is.
    pub fn front(&self, slot: SlotId) -> Option<Ticket> {
        self.lines.get(&slot).and_then(|line| line.first().copied())
    }

    pub fn add_hold(&mut self, hold: Hold) -> HoldId {
        let (attempt, expires, fence, slots) = (hold.attempt, hold.expires, hold.fence, hold.slots.clone());
        let owner = hold.owner.as_deref().copied();
        let id = self.holds.insert(hold);
        let State { by_attempt, hasher, holds, .. } = self;
        by_attempt.insert_unique(hasher.hash_one(attempt), id, |id| hasher.hash_one(holds[*id].attempt));
        self.expiry.insert((expires, id));
        for slot in slots {
            // A re-entrant hold stands beside its first, so that the rule can count owners by their fences.
            let holds = &self.slots[slot].holds;
            let beside = holds.iter().rposition(|other| self.holds[*other].fence == fence);
            let at = beside.map_or(holds.len(), |i| i + 1);
            self.slots[slot].holds.insert(at, id);
        }
        if let Some(owner) = owner {
            self.owners.entry(owner).or_default().holds.insert(id);
        }
        id
    }

    pub fn view_hold(&self, now: Moment, id: HoldId) -> Held {
        let revoked = self.revoked.get(&id).map(|reason| reason.as_ref().into());
        Held { revoked, ..self.holds[id].view(now) }
    }

    pub fn set_expiry(&mut self, id: HoldId, expires: Moment) {
        let hold = &mut self.holds[id];
        self.expiry.remove(&(hold.expires, id));
        hold.expires = expires;
        self.expiry.insert((expires, id));
    }

    /// Lets a released hold stay for the rest of its minimum hold, without its attempt and its owner.
    pub fn linger(&mut self, id: HoldId) {
        self.disown(id);
        self.set_expiry(id, self.holds[id].stays);
        self.holds[id].ttl_ms = 0;
    }

    /// The attempt and the owner of this hold mean nothing any more.
    fn disown(&mut self, id: HoldId) {
        let hash = self.hasher.hash_one(self.holds[id].attempt);
        if let Ok(entry) = self.by_attempt.find_entry(hash, |other| *other == id) {
            entry.remove();
        }
        if let Some(owner) = self.holds[id].owner.take() {
            self.forget(*owner, |estate| estate.holds.remove(&id));
        }
    }

    /// Takes the hold out of everything but its slots' tidiness, which is the caller's to restore.
    pub fn remove_hold(&mut self, id: HoldId) -> Hold {
        self.disown(id);
        self.revoked.remove(&id);
        let hold = self.holds.remove(id);
        self.expiry.remove(&(hold.expires, id));
        for slot in &hold.slots {
            self.slots[*slot].holds.retain(|other| *other != id);
        }
        hold
    }

    pub fn add_waiter(&mut self, ticket: Ticket, waiter: Waiter) {
        self.tickets.insert(waiter.ask.claim.attempt, ticket);
        for slot in &waiter.slots {
            self.lines.entry(*slot).or_default().insert(ticket);
        }
        if waiter.until < Moment::NEVER {
            self.patience.insert((waiter.until, ticket));
        }
        if let Some(owner) = waiter.ask.owner {
            self.owners.entry(owner).or_default().tickets.insert(ticket);
        }
        self.waiters.insert(ticket, waiter);
    }

    /// Takes the ask out of its lines; the slots' tidiness is the caller's to restore.
    pub fn remove_waiter(&mut self, ticket: Ticket) -> Waiter {
        let waiter = self.waiters.remove(&ticket).expect("a live ticket");
        self.tickets.remove(&waiter.ask.claim.attempt);
        self.patience.remove(&(waiter.until, ticket));
        for slot in &waiter.slots {
            if let Some(line) = self.lines.get_mut(slot) {
                line.remove(&ticket);
            }
        }
        if let Some(owner) = waiter.ask.owner {
            self.forget(owner, |estate| estate.tickets.remove(&ticket));
        }
        waiter
    }

    fn forget(&mut self, owner: Owner, what: impl FnOnce(&mut Estate) -> bool) {
        if let Some(estate) = self.owners.get_mut(&owner) {
            what(estate);
            if estate.holds.is_empty() && estate.tickets.is_empty() {
                self.owners.remove(&owner);
            }
        }
    }

    pub fn delay(&mut self, slot: SlotId, until: Moment) {
        let until = self.delays.get(&slot).map_or(until, |now| until.max(*now));
        self.undelay(slot);
        self.delays.insert(slot, until);
        self.delay_ends.insert((until, slot));
    }

    pub fn undelay(&mut self, slot: SlotId) {
        if let Some(until) = self.delays.remove(&slot) {
            self.delay_ends.remove(&(until, slot));
        }
    }
}

fn ms32(d: Duration) -> u32 {
    u32::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

pub(super) fn ms64(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}
