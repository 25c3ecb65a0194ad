//! Admission: decides from the queues as they were read whether a request is granted. The rule itself is in
//! `lockkeeper_core::admission`.

use lockkeeper_core::admission::{ActiveHold, Admission, evaluate, evaluate_all};
use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{Busy, Error, Fence, LockName, LockRequest, LockView, Mode, Result};

use crate::codec::RequestState;
use crate::keys::{AttemptHash, hash_owner};
use crate::queue::{QueueEntry, QueueSnapshot};

/// The decision about one request.
#[derive(Debug)]
pub enum Decision {
    /// Grant it. `Some`: a re-entry, with the fence that its owner has already.
    Grant(Option<lockkeeper_core::Fence>),
    /// It must wait.
    Wait,
}

/// Decides about a request from the queues of all its names. `own`: the request's nodes. `is_waiting`: an earlier
/// decision was to wait.
///
/// No request can be inserted before an existing node, so a lock that is free for a request stays free for it. Only a
/// re-entry passes waiters, and its transaction checks that the hold that it re-enters still exists.
pub fn evaluate_request(
    request: &LockRequest,
    own: &[String],
    queues: &[QueueSnapshot],
    base: u64,
    is_waiting: bool,
) -> Result<Decision> {
    refuse_self_wait(request, own, queues)?;
    let owner = request.owner.as_ref().map(hash_owner);
    let each = queues.iter().zip(own).map(|(queue, own)| {
        let verdict = evaluate(owner, request.mode, queue.active_holds(base, own));
        match verdict {
            // A hold-back and the waiters ahead come first.
            Admission::Free if is_behind_waiter(queue, own) || is_held_back(queue) => Ok(Admission::Blocked),
            // A foreign client that waits takes the lock when the first hold ends, because it does not know of a
            // second one.
            Admission::Reenter(_) if waiting_ahead(queue, own).any(QueueEntry::is_foreign) => {
                Err(Error::Deadlock(vec![queue.name.clone()]))
            }
            verdict => Ok(verdict),
        }
    });
    match evaluate_all(request, is_waiting, each)? {
        Admission::Free => Ok(Decision::Grant(None)),
        Admission::Reenter(fence) => match revoked(queues, base, fence) {
            Some(reason) => Err(revoked_error(reason)),
            None => Ok(Decision::Grant(Some(fence))),
        },
        Admission::Upgrade => Err(Error::Deadlock(request.key.names.as_slice().to_vec())),
        Admission::Blocked => Ok(Decision::Wait),
    }
}

/// The reason of a revocation, if the hold with this fence was revoked.
fn revoked(queues: &[QueueSnapshot], base: u64, fence: Fence) -> Option<&str> {
    let own = queues.iter().flat_map(QueueSnapshot::holders).filter(|entry| entry.fence(base) == fence);
    own.filter_map(QueueEntry::revoked).next()
}

/// The error for an attempt or an owner whose hold was revoked: it cannot acquire again before it has released.
pub fn revoked_error(reason: &str) -> Error {
    Error::Lost(LossReason::Revoked(reason.into()).to_string())
}

fn is_held_back(queue: &QueueSnapshot) -> bool {
    queue.hold_backs.iter().any(|hold_back| !hold_back.lingers())
}

fn is_behind_waiter(queue: &QueueSnapshot, own: &str) -> bool {
    !queue.sharers_ahead && waiting_ahead(queue, own).next().is_some()
}

/// Whether a request shares or counts one lock and has no owner.
pub fn is_plain_sharer(request: &LockRequest) -> bool {
    request.mode != Mode::Exclusive && request.owner.is_none() && request.key.names.count() == 1
}

/// The conclusion about all entries ahead from the entry right ahead of a plain sharer or counted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredecessorVerdict {
    /// All of them hold the lock and share it.
    AllShare,
    /// This one waits, so the request waits behind it.
    Waits,
    /// The others must be read.
    Unknown,
}

/// Evaluates the entry right ahead of a plain sharer. If it holds, shares and has no owner, it was granted by the same rule: no waiter was ahead
/// of it, and every holder shared. That is still so. No entry is inserted before another one, and while it holds, an
/// exclusive hold could only be a re-entry of an exclusive hold. Hold-backs are another matter. A counted request has to
/// count the holders, unless it waits.
pub fn evaluate_predecessor(queue: &QueueSnapshot, mode: Mode, position: usize) -> PredecessorVerdict {
    let ahead = &queue.entries[..position];
    let known = match ahead {
        // A foreign client holds by its position alone.
        [_, .., before] if ahead.iter().all(|entry| entry.hash.is_some()) => before.stored(),
        _ => None,
    };
    match known.map(|stored| (stored.state, stored.mode, &stored.owner)) {
        Some((RequestState::Granted, Mode::Shared, None)) if mode == Mode::Shared => {
            PredecessorVerdict::AllShare
        }
        Some((RequestState::Waiting | RequestState::Queued, ..)) => PredecessorVerdict::Waits,
        _ => PredecessorVerdict::Unknown,
    }
}

/// The waiters ahead of a request.
fn waiting_ahead<'a>(queue: &'a QueueSnapshot, own: &str) -> impl Iterator<Item = &'a QueueEntry> {
    let position = queue.position(own).unwrap_or(queue.entries.len());
    queue.entries[..position].iter().filter(|entry| !queue.holds(entry))
}

/// The last entry ahead of a request. `None`: there is no entry ahead.
pub fn predecessor<'a>(queue: &'a QueueSnapshot, own: &str) -> Option<&'a QueueEntry> {
    let position = queue.position(own).unwrap_or(queue.entries.len());
    // A re-entry was enqueued later than this request, and still blocks it.
    let later = queue.entries.iter().skip(position + 1).find(|entry| entry.is_in(RequestState::Granted));
    queue.entries[..position].last().or(later)
}

/// The entry whose grant or deletion may admit a request that can share the lock: the last one ahead that does not
/// hold. The nodes are read one after the other, so an entry further back may already have been read as a holder.
pub fn entry_to_watch<'a>(mode: Mode, queue: &'a QueueSnapshot, own: &str) -> Option<&'a QueueEntry> {
    let waiting_ahead = waiting_ahead(queue, own).last().filter(|_| mode != Mode::Exclusive);
    waiting_ahead.or_else(|| predecessor(queue, own))
}

/// Whether a grant of `entry` can admit a request of this mode: both can hold the lock together.
pub fn may_share(mode: Mode, entry: &QueueEntry) -> bool {
    matches!((mode, entry.mode()), (Mode::Shared, Mode::Shared) | (Mode::Permit(_), Mode::Permit(_)))
}

/// Rejects a request whose owner waits ahead of it for a part of the same names or for a weaker mode: the request
/// would wait for itself.
fn refuse_self_wait(request: &LockRequest, own: &[String], queues: &[QueueSnapshot]) -> Result<()> {
    let Some(owner) = request.owner.as_ref().map(hash_owner) else { return Ok(()) };
    let earlier = |queue: &QueueSnapshot, own: &str| -> Vec<(AttemptHash, Mode)> {
        let found = waiting_ahead(queue, own)
            .filter(|entry| entry.owner() == Some(owner) && entry.is_in(RequestState::Waiting));
        found.filter_map(|entry| Some((entry.hash?, entry.mode()))).collect()
    };
    let each: Vec<(LockName, Vec<(AttemptHash, Mode)>)> =
        queues.iter().zip(own).map(|(queue, own)| (queue.name.clone(), earlier(queue, own))).collect();
    let others: std::collections::BTreeMap<AttemptHash, Mode> =
        each.iter().flat_map(|(_, found)| found.iter().copied()).collect();
    for (other, mode) in others {
        let common: Vec<LockName> = each
            .iter()
            .filter(|(_, found)| found.iter().any(|(found, _)| *found == other))
            .map(|(name, _)| name.clone())
            .collect();
        let hold = ActiveHold { owner: Some(owner), mode, fence: lockkeeper_core::Fence::MIN };
        let covers =
            matches!(evaluate(Some(owner), request.mode, std::iter::once(hold)), Admission::Reenter(_));
        if common.len() < request.key.names.count() || !covers {
            return Err(Error::Deadlock(common));
        }
    }
    Ok(())
}

/// The holders that block a request whose wait time is over.
pub fn busy(own: &[String], queues: &[QueueSnapshot], base: u64) -> Busy {
    let blocks = |(queue, own): &(&QueueSnapshot, &String)| {
        predecessor(queue, own).is_some() || !queue.hold_backs.is_empty()
    };
    let (blocked, own) = queues.iter().zip(own).find(blocks).unwrap_or((&queues[0], &own[0]));
    let held = blocked.holders().filter(|entry| entry.path != *own).map(|entry| entry.holder_view(base));
    let kept = blocked.hold_backs.iter().filter_map(|hold_back| hold_back.holder_view());
    Busy {
        name: blocked.name.clone(),
        held: held.chain(kept).take(LockView::BUSY).collect(),
        waiting: blocked.waiters().filter(|entry| entry.path != *own).count(),
    }
}
