//! The state of the table, kept small: a million held locks cost less than 250 bytes each beyond their names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;
use std::hash::BuildHasher;

use super::Now;
use super::slab::Slab;
use crate::admission::ActiveHold;
use crate::{
    Attempt, BootInstant, Fence, Holder, HolderView, LockName, LockRequest, Mode, Owner, WaiterView, WallTime,
};

pub(super) type Ids = SmallVec<[u32; 4]>;
pub(super) type SlotId = u32;
pub(super) type HoldId = u32;
/// The position of a request in all its queues: smaller came earlier.
pub(super) type Ticket = u64;

/// One name that has a holder, a waiter or a lock-delay.
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
    pub stays: BootInstant,
    pub since: WallTime,
    pub expires: BootInstant,
    pub mode: Mode,
    /// Zero once it lingers: nothing can be renewed then, and a flag of its own would cost eight bytes.
    ttl_ms: u32,
    pub lock_delay_ms: u32,
    pub holder: Arc<Holder>,
}

impl Hold {
    pub fn new(request: &LockRequest, slots: Ids, fence: Fence, now: Now) -> Self {
        Hold {
            attempt: request.key.attempt,
            owner: request.owner.map(Box::new),
            slots,
            fence,
            stays: now.moment + request.min_hold,
            since: now.wall,
            expires: now.moment + request.ttl,
            mode: request.mode,
            ttl_ms: ms32(request.ttl),
            lock_delay_ms: ms32(request.lock_delay),
            holder: request.holder.clone(),
        }
    }

    /// Released, and kept only for the rest of its minimum hold: it cannot be renewed, released or re-entered.
    pub fn lingering(&self) -> bool {
        self.ttl_ms == 0
    }

    pub fn active_hold(&self) -> ActiveHold {
        ActiveHold { owner: self.owner.as_deref().copied(), mode: self.mode, fence: self.fence }
    }

    pub fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms.into())
    }

    fn view(&self, now: BootInstant) -> HolderView {
        HolderView {
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

/// One queued request.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub request: LockRequest,
    pub slots: Ids,
    pub until: BootInstant,
    pub since: WallTime,
}

impl Waiter {
    pub fn view(&self) -> WaiterView {
        WaiterView { holder: (*self.request.holder).clone(), mode: self.request.mode, since: self.since }
    }
}

/// The holds and the queued requests of an explicit owner.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnerState {
    pub holds: BTreeSet<HoldId>,
    pub tickets: BTreeSet<Ticket>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct TableState {
    pub slots: Slab<Slot>,
    pub by_name: BTreeMap<LockName, SlotId>,
    pub holds: Slab<Hold>,
    by_attempt: HashTable<HoldId>,
    hasher: DefaultHashBuilder,
    pub expiry: BTreeSet<(BootInstant, HoldId)>,

    pub queues: HashMap<SlotId, BTreeSet<Ticket>>,
    pub waiters: BTreeMap<Ticket, Waiter>,
    pub tickets: HashMap<Attempt, Ticket>,
    pub wait_deadlines: BTreeSet<(BootInstant, Ticket)>,

    pub delays: HashMap<SlotId, BootInstant>,
    pub delay_ends: BTreeSet<(BootInstant, SlotId)>,

    pub owners: HashMap<Owner, OwnerState>,
    /// The revoked holds, and why. They are few, so a map of their own costs the other holds nothing.
    pub revoked: HashMap<HoldId, Arc<str>>,
}

impl TableState {
    pub fn slot_of(&mut self, name: &LockName) -> SlotId {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = self.slots.insert(Slot { name: name.clone(), holds: Ids::new() });
        self.by_name.insert(name.clone(), id);
        id
    }

    /// Removes a slot without holders, waiters and lock-delay.
    pub fn sweep(&mut self, slot: SlotId) {
        if self.queues.get(&slot).is_some_and(BTreeSet::is_empty) {
            self.queues.remove(&slot);
        }
        if self.slots[slot].holds.is_empty()
            && !self.queues.contains_key(&slot)
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

    pub fn active_holds(&self, slot: SlotId) -> impl Iterator<Item = ActiveHold> + '_ {
        self.slots[slot].holds.iter().map(|id| self.holds[*id].active_hold())
    }

    /// The request at the front of the queue.
    pub fn front(&self, slot: SlotId) -> Option<Ticket> {
        self.queues.get(&slot).and_then(|queue| queue.first().copied())
    }

    pub fn add_hold(&mut self, hold: Hold) -> HoldId {
        let (attempt, expires, fence, slots) = (hold.attempt, hold.expires, hold.fence, hold.slots.clone());
        let owner = hold.owner.as_deref().copied();
        let id = self.holds.insert(hold);
        let TableState { by_attempt, hasher, holds, .. } = self;
        by_attempt.insert_unique(hasher.hash_one(attempt), id, |id| hasher.hash_one(holds[*id].attempt));
        self.expiry.insert((expires, id));
        for slot in slots {
            // A re-entrant hold is next to its first one, so that the rule can count owners by their fences.
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

    pub fn view_hold(&self, now: BootInstant, id: HoldId) -> HolderView {
        let revoked = self.revoked.get(&id).map(|reason| reason.as_ref().into());
        HolderView { revoked, ..self.holds[id].view(now) }
    }

    pub fn set_expiry(&mut self, id: HoldId, expires: BootInstant) {
        let hold = &mut self.holds[id];
        self.expiry.remove(&(hold.expires, id));
        hold.expires = expires;
        self.expiry.insert((expires, id));
    }

    /// Keeps a released hold for the rest of its minimum hold, without its attempt and its owner.
    pub fn linger(&mut self, id: HoldId) {
        self.disown(id);
        self.set_expiry(id, self.holds[id].stays);
        self.holds[id].ttl_ms = 0;
    }

    /// Removes the attempt and the owner of this hold from the indexes.
    fn disown(&mut self, id: HoldId) {
        let hash = self.hasher.hash_one(self.holds[id].attempt);
        if let Ok(entry) = self.by_attempt.find_entry(hash, |other| *other == id) {
            entry.remove();
        }
        if let Some(owner) = self.holds[id].owner.take() {
            self.forget(*owner, |owner_state| owner_state.holds.remove(&id));
        }
    }

    /// Removes the hold. The caller sweeps its slots.
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
        self.tickets.insert(waiter.request.key.attempt, ticket);
        for slot in &waiter.slots {
            self.queues.entry(*slot).or_default().insert(ticket);
        }
        if waiter.until < BootInstant::NEVER {
            self.wait_deadlines.insert((waiter.until, ticket));
        }
        if let Some(owner) = waiter.request.owner {
            self.owners.entry(owner).or_default().tickets.insert(ticket);
        }
        self.waiters.insert(ticket, waiter);
    }

    /// Removes the request from its queues. The caller sweeps its slots.
    pub fn remove_waiter(&mut self, ticket: Ticket) -> Waiter {
        let waiter = self.waiters.remove(&ticket).expect("a live ticket");
        self.tickets.remove(&waiter.request.key.attempt);
        self.wait_deadlines.remove(&(waiter.until, ticket));
        for slot in &waiter.slots {
            if let Some(queue) = self.queues.get_mut(slot) {
                queue.remove(&ticket);
            }
        }
        if let Some(owner) = waiter.request.owner {
            self.forget(owner, |owner_state| owner_state.tickets.remove(&ticket));
        }
        waiter
    }

    fn forget(&mut self, owner: Owner, what: impl FnOnce(&mut OwnerState) -> bool) {
        if let Some(owner_state) = self.owners.get_mut(&owner) {
            what(owner_state);
            if owner_state.holds.is_empty() && owner_state.tickets.is_empty() {
                self.owners.remove(&owner);
            }
        }
    }

    pub fn delay(&mut self, slot: SlotId, until: BootInstant) {
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
