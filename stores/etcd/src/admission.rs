//! Whether a request may hold its locks now: core's rule of admission, applied to the queues as they were read.

use lockkeeper_core::admission::{ActiveHold, Admission, evaluate};
use lockkeeper_core::{Busy, Fence, LockName, LockRequest, LockView, Mode, Wait};
use lockkeeper_store_kit::admission::{AdmissionEntry, RequestQueue, may_share};
use lockkeeper_store_kit::hash_owner;

use crate::codec::EntryState;
use crate::keys::KeyId;
use crate::queue::{QueueEntry, QueueSnapshot};

/// A queue, as it was read for the request of this attempt.
#[derive(Clone, Copy)]
pub struct RequestView<'a> {
    pub queue: &'a QueueSnapshot,
    pub attempt: &'a KeyId,
}

impl RequestQueue for RequestView<'_> {
    type Entry = QueueEntry;

    fn name(&self) -> &LockName {
        &self.queue.name
    }

    fn other_holders(&self) -> impl Iterator<Item = &QueueEntry> {
        self.queue.holders().filter(|entry| entry.attempt.as_ref() != Some(self.attempt))
    }

    fn active_holds(&self, base: u64) -> impl Iterator<Item = ActiveHold> {
        self.other_holders().map(move |entry| entry.active_hold(base))
    }

    /// With all lock-delays, which are entries.
    fn waiting_ahead(&self) -> impl Iterator<Item = &QueueEntry> {
        let own_position = self.queue.entry_of(self.attempt).map_or(i64::MAX, |entry| entry.created);
        self.queue.all.iter().filter(move |entry| {
            let before = entry.created < own_position && entry.attempt.as_ref() != Some(self.attempt);
            entry.is(EntryState::Delayed) || (before && !self.queue.holds(entry))
        })
    }

    fn is_held_back(&self) -> bool {
        false
    }
}

impl RequestView<'_> {
    /// The hold with this fence that the request's owner may re-enter.
    pub fn find_reentered(&self, request: &LockRequest, base: u64, fence: Fence) -> Option<&QueueEntry> {
        let owner = request.owner.as_ref().map(hash_owner);
        let admits =
            |entry: &&QueueEntry| evaluate(owner, request.mode, std::iter::once(entry.active_hold(base)));
        self.other_holders().find(|entry| admits(entry) == Admission::Reenter(fence))
    }

    /// The entry that the request waits for: until it is gone, or admits others, the request is not granted. `None`: no entry blocks it.
    pub fn find_blocker(&self, request: &LockRequest, base: u64) -> Option<&QueueEntry> {
        if let Some(before) = self.waiting_ahead().last() {
            return Some(before);
        }
        let owner = request.owner.as_ref().map(hash_owner);
        if evaluate(owner, request.mode, self.active_holds(base)) != Admission::Blocked {
            return None;
        }
        let excluding = self.other_holders().filter(|entry| !may_share(request.mode, entry.mode())).last();
        excluding.or(self.other_holders().last())
    }

    /// Whether the part of a long queue that was read decides the request. Any holder and any waiter ahead blocks an exclusive request without
    /// an owner, so one of them proves that it must wait. Only a read that shows every holder proves that it need not. For a plain sharer see
    /// [`predecessor_decides`](Self::predecessor_decides), for a plain counted request [`ends_decide`](Self::ends_decide).
    pub fn is_sufficient(&self, request: &LockRequest) -> bool {
        let queue = self.queue;
        if queue.unread == 0 {
            return true;
        }
        match request.mode {
            _ if request.owner.is_some() => false,
            Mode::Shared => self.predecessor_decides(),
            Mode::Permit(_) => self.ends_decide(),
            Mode::Exclusive => {
                let blocked =
                    || self.waiting_ahead().next().is_some() || self.other_holders().next().is_some();
                queue.knows_predecessor(self.attempt, request.wait != Wait::No)
                    && (queue.knows_holders() || blocked())
            }
        }
    }

    /// Whether the entry before a plain counted request and the known holders decide the request. If that entry waits, the request waits
    /// behind it. If it has no owner and does not wait, it was granted when no waiter was ahead of it, and no entry is created before
    /// another one: so no waiter is ahead of the request, and its permits are counted. All holders must be known for that. The oldest entry
    /// must be known as for a plain sharer.
    fn ends_decide(&self) -> bool {
        let queue = self.queue;
        let decided = match queue.predecessor(self.attempt) {
            Some(before) if before.is_waiting() => true,
            Some(before) => queue.knows_holders() && !before.is_foreign() && !before.has_owner(),
            None => queue.knows_holders() && queue.is_first(self.attempt),
        };
        decided && queue.knows_oldest()
    }

    /// Whether the entry before a plain sharer decides its request. If it waits, the request waits behind it. If it holds, shares and has no
    /// owner, it was granted by the same rule: no waiter was ahead of it, and every holder shared. That is still so. No entry is created
    /// before another one, and while it holds, an exclusive hold could only be a re-entry of an exclusive hold. Lock-delays begin at any time,
    /// so all of them must be known; and so must the oldest entry, which may be a grant of this same attempt in a key slot, or a foreign
    /// holder.
    fn predecessor_decides(&self) -> bool {
        let queue = self.queue;
        let Some(before) = queue.predecessor(self.attempt).filter(|_| queue.knows_oldest()) else {
            return false;
        };
        let shares = before.is(EntryState::Granted) && before.mode() == Mode::Shared && !before.has_owner();
        before.is_waiting() || (shares && queue.knows_delays())
    }
}

/// Whether a request also reads the oldest entry and its own one, because these may decide it.
pub fn reads_ends(request: &LockRequest) -> bool {
    request.mode != Mode::Exclusive && request.owner.is_none()
}

/// Which holders block a request whose wait has ended.
pub fn busy(request: &LockRequest, attempt: &KeyId, queues: &[QueueSnapshot], base: u64) -> Busy {
    let mut views = queues.iter().map(|queue| RequestView { queue, attempt });
    let blocked = views.find(|view| view.find_blocker(request, base).is_some());
    let blocked = blocked.unwrap_or(RequestView { queue: &queues[0], attempt });
    let view =
        |entry: &QueueEntry| entry.holder_view(base, entry.value.as_ref().map_or(0, |value| value.ttl_ms));
    let waiters = blocked.queue.waiters().filter(|entry| entry.attempt.as_ref() != Some(attempt));
    Busy {
        name: blocked.queue.name.clone(),
        held: blocked.other_holders().take(LockView::BUSY).map(view).collect(),
        waiting: waiters.count() + blocked.queue.unread,
    }
}
