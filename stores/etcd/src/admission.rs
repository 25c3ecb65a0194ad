//! Whether a request may hold its locks now: core's rule of admission, applied to the queues as they were read.

use lockkeeper_core::admission::{ActiveHold, Admission, evaluate, evaluate_all};
use lockkeeper_core::{Busy, Error, Fence, LockName, LockRequest, LockView, Mode, Result, Wait};

use crate::codec::EntryState;
use crate::keys::{KeyId, hash_owner};
use crate::queue::{QueueEntry, QueueSnapshot};
use crate::revoke::revoked_error;

/// The decision about a request, by the queues.
#[derive(Debug)]
pub enum RequestVerdict {
    /// It may hold the locks. `Some`: by re-entry, with the fence that its owner already has.
    Grant(Option<Fence>),
    /// It must wait.
    Wait,
}

/// Evaluates a request against the queues of all its names. `queued`: the request has a queue entry.
pub fn evaluate_request(
    request: &LockRequest,
    attempt: &KeyId,
    queues: &[QueueSnapshot],
    base: u64,
    queued: bool,
) -> Result<RequestVerdict> {
    reject_self_wait(request, attempt, queues)?;
    let owner = request.owner.as_ref().map(hash_owner);
    let each = queues.iter().map(|queue| {
        let admission =
            evaluate(owner, request.mode, queue.other_holders(attempt).map(|entry| entry.active_hold(base)));
        match admission {
            // A lock-delay, and every waiter ahead, comes first.
            Admission::Free if ahead_of(queue, attempt).next().is_some() => Ok(Admission::Blocked),
            // A waiting foreign client takes the lock as soon as the first hold is gone: it does not know of a second
            // one.
            Admission::Reenter(_) if ahead_of(queue, attempt).any(QueueEntry::is_foreign) => {
                Err(Error::Deadlock(vec![queue.name.clone()]))
            }
            admission => Ok(admission),
        }
    });
    match evaluate_all(request, queued, each)? {
        Admission::Free => Ok(RequestVerdict::Grant(None)),
        Admission::Reenter(fence) => {
            // An owner whose hold is revoked cannot re-enter it.
            let own = queues.iter().flat_map(|queue| queue.other_holders(attempt));
            let revoked = own.filter(|entry| entry.fence(base) == fence).find_map(QueueEntry::revoked);
            revoked.map_or(Ok(RequestVerdict::Grant(Some(fence))), |reason| Err(revoked_error(reason)))
        }
        Admission::Upgrade => Err(Error::Deadlock(request.key.names.as_slice().to_vec())),
        Admission::Blocked => Ok(RequestVerdict::Wait),
    }
}

/// The hold with this fence that the request's owner may re-enter.
pub fn find_reentered<'a>(
    request: &LockRequest,
    attempt: &'a KeyId,
    queue: &'a QueueSnapshot,
    base: u64,
    fence: Fence,
) -> Option<&'a QueueEntry> {
    let owner = request.owner.as_ref().map(hash_owner);
    let admits =
        |entry: &&QueueEntry| evaluate(owner, request.mode, std::iter::once(entry.active_hold(base)));
    queue.other_holders(attempt).find(|entry| admits(entry) == Admission::Reenter(fence))
}

/// The entries ahead of this attempt that do not hold, and all lock-delays.
fn ahead_of<'a>(queue: &'a QueueSnapshot, attempt: &'a KeyId) -> impl Iterator<Item = &'a QueueEntry> {
    let own_position = queue.entry_of(attempt).map_or(i64::MAX, |entry| entry.created);
    queue.all.iter().filter(move |entry| {
        let before = entry.created < own_position && entry.attempt.as_ref() != Some(attempt);
        entry.is(EntryState::Delayed) || (before && !queue.holds(entry))
    })
}

/// The entry that this request waits for: until it is gone, or admits others, the request is not granted. `None`: no
/// entry blocks it.
pub fn find_blocker<'a>(
    request: &LockRequest,
    attempt: &'a KeyId,
    queue: &'a QueueSnapshot,
    base: u64,
) -> Option<&'a QueueEntry> {
    if let Some(before) = ahead_of(queue, attempt).last() {
        return Some(before);
    }
    let owner = request.owner.as_ref().map(hash_owner);
    let others = || queue.other_holders(attempt);
    match evaluate(owner, request.mode, others().map(|entry| entry.active_hold(base))) {
        Admission::Blocked => {
            others().filter(|entry| !may_share(request.mode, entry)).last().or(others().last())
        }
        _ => None,
    }
}

/// Whether a change of `entry` other than its end could admit a request with this mode: its own grant, if both may
/// hold together.
pub fn may_share(mode: Mode, entry: &QueueEntry) -> bool {
    let theirs = entry.value.as_ref().map_or(Mode::Exclusive, |value| value.mode);
    matches!((mode, theirs), (Mode::Shared, Mode::Shared) | (Mode::Permit(_), Mode::Permit(_)))
}

/// Rejects a request whose owner waits ahead of it for a part of the same names, or in a weaker mode: it would wait
/// for itself.
fn reject_self_wait(request: &LockRequest, attempt: &KeyId, queues: &[QueueSnapshot]) -> Result<()> {
    let Some(owner) = request.owner.as_ref().map(hash_owner) else { return Ok(()) };
    let earlier = |queue: &QueueSnapshot| -> Vec<(KeyId, Mode)> {
        let found = ahead_of(queue, attempt)
            .filter(|entry| entry.owner() == Some(owner) && entry.is(EntryState::Waiting));
        found.filter_map(|entry| Some((entry.attempt?, entry.value.as_ref()?.mode))).collect()
    };
    let each: Vec<(LockName, Vec<(KeyId, Mode)>)> =
        queues.iter().map(|queue| (queue.name.clone(), earlier(queue))).collect();
    let others: std::collections::BTreeMap<KeyId, Mode> =
        each.iter().flat_map(|(_, found)| found.iter().copied()).collect();
    for (other, mode) in others {
        let common: Vec<LockName> = each
            .iter()
            .filter(|(_, found)| found.iter().any(|(found, _)| *found == other))
            .map(|(name, _)| name.clone())
            .collect();
        let active_hold = ActiveHold { owner: Some(owner), mode, fence: Fence::MIN };
        let covers = matches!(
            evaluate(Some(owner), request.mode, std::iter::once(active_hold)),
            Admission::Reenter(_)
        );
        if common.len() < request.key.names.count() || !covers {
            return Err(Error::Deadlock(common));
        }
    }
    Ok(())
}

/// Whether the part of a long queue that was read decides the request. Any holder and any waiter ahead blocks an
/// exclusive request without an owner, so one of them proves that it must wait. Only a read that shows every holder
/// proves that it need not. For a plain sharer see [`predecessor_decides`], for a plain counted request [`ends_decide`].
pub fn is_sufficient(request: &LockRequest, attempt: &KeyId, queue: &QueueSnapshot) -> bool {
    if queue.unread == 0 {
        return true;
    }
    if is_plain_sharer(request) {
        return predecessor_decides(attempt, queue);
    }
    if is_plain_counted(request) {
        return ends_decide(attempt, queue);
    }
    let blocked =
        || ahead_of(queue, attempt).next().is_some() || queue.other_holders(attempt).next().is_some();
    is_simple(request)
        && queue.knows_predecessor(attempt, request.wait != Wait::No)
        && (queue.knows_holders() || blocked())
}

/// Whether any other holder, and any waiter ahead, blocks this request.
pub fn is_simple(request: &LockRequest) -> bool {
    request.mode == Mode::Exclusive && request.owner.is_none()
}

/// Whether a request shares one lock and has no owner.
pub fn is_plain_sharer(request: &LockRequest) -> bool {
    request.mode == Mode::Shared && request.owner.is_none() && request.key.names.count() == 1
}

/// Whether a request also reads the oldest entry and its own one, because these may decide it.
pub fn reads_ends(request: &LockRequest) -> bool {
    is_plain_sharer(request) || is_plain_counted(request)
}

/// Whether a request counts permits of one lock and has no owner.
pub fn is_plain_counted(request: &LockRequest) -> bool {
    matches!(request.mode, Mode::Permit(_)) && request.owner.is_none() && request.key.names.count() == 1
}

/// Whether the entry before a plain counted request and the known holders decide the request. If that entry waits, the request waits behind
/// it. If it has no owner and does not wait, it was granted when no waiter was ahead of it, and no entry is created before another one: so
/// no waiter is ahead of the request, and its permits are counted. All holders must be known for that. The oldest entry must be known as for a
/// plain sharer.
fn ends_decide(attempt: &KeyId, queue: &QueueSnapshot) -> bool {
    let without_owner =
        |before: &QueueEntry| before.value.as_ref().is_some_and(|value| value.owner.is_none());
    let decided = match queue.predecessor(attempt) {
        Some(before) if before.is(EntryState::Waiting) => true,
        Some(before) => queue.knows_holders() && without_owner(before),
        None => queue.knows_holders() && queue.is_first(attempt),
    };
    decided && queue.knows_oldest()
}

/// Whether the entry before a plain sharer decides its request. If it waits, the request waits behind it. If it holds, shares and has no owner, it
/// was granted by the same rule: no waiter was ahead of it, and every holder shared. That is still so. No entry is
/// created before another one, and while it holds, an exclusive hold could only be a re-entry of an exclusive hold.
/// Lock-delays begin at any time, so all of them must be known; and so must the oldest entry, which may be a grant of
/// this same attempt in a key slot, or a foreign holder.
fn predecessor_decides(attempt: &KeyId, queue: &QueueSnapshot) -> bool {
    let Some(before) = queue.predecessor(attempt).filter(|_| queue.knows_oldest()) else { return false };
    let shares = before.value.as_ref().is_some_and(|value| {
        value.state == EntryState::Granted && value.mode == Mode::Shared && value.owner.is_none()
    });
    before.is(EntryState::Waiting) || (shares && queue.knows_delays())
}

/// Which holders block a request whose wait has ended.
pub fn busy(request: &LockRequest, attempt: &KeyId, queues: &[QueueSnapshot], base: u64) -> Busy {
    let blocked = queues
        .iter()
        .find(|queue| find_blocker(request, attempt, queue, base).is_some())
        .unwrap_or(&queues[0]);
    let others = |entry: &&QueueEntry| entry.attempt.as_ref() != Some(attempt);
    let held = blocked.holders().filter(others).take(LockView::BUSY);
    Busy {
        name: blocked.name.clone(),
        held: held
            .map(|entry| entry.holder_view(base, entry.value.as_ref().map_or(0, |value| value.ttl_ms)))
            .collect(),
        waiting: blocked.waiters().filter(others).count() + blocked.unread,
    }
}
