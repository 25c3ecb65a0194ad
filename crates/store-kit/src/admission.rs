//! Core's rule of admission for a store whose clients decide themselves, from the queues as they read them: a list of entries for each name, the
//! oldest first, in which no entry is ever inserted before another one.

use std::collections::BTreeMap;

use lockkeeper_core::admission::{ActiveHold, Admission, evaluate, evaluate_all};
use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{Error, Fence, LockName, LockRequest, Mode, Owner, Result};

use crate::AttemptHash;

/// One entry of a queue: a holder or a waiter.
pub trait AdmissionEntry {
    /// The hash of its attempt. `None`: the entry of a foreign client.
    fn attempt(&self) -> Option<AttemptHash>;
    /// The hash of its owner.
    fn owner(&self) -> Option<Owner>;
    /// Its mode.
    fn mode(&self) -> Mode;
    /// Its fence, if it holds the lock.
    fn fence(&self, base: u64) -> Fence;
    /// Whether its state is written as waiting.
    fn is_waiting(&self) -> bool;
    /// Whether a client of another library wrote it. Such a client waits for the first hold to end, and knows of no second one.
    fn is_foreign(&self) -> bool;
    /// Why the hold was revoked, if it was.
    fn revoked(&self) -> Option<&str>;
}

/// The queue of one name, as it was read for one request.
pub trait RequestQueue {
    /// Its entries.
    type Entry: AdmissionEntry;

    /// The name.
    fn name(&self) -> &LockName;
    /// The entries that hold the lock, except that of the request.
    fn other_holders(&self) -> impl Iterator<Item = &Self::Entry>;
    /// The same holds, and any that remain without an entry.
    fn active_holds(&self, base: u64) -> impl Iterator<Item = ActiveHold>;
    /// The entries ahead of the request that do not hold the lock.
    fn waiting_ahead(&self) -> impl Iterator<Item = &Self::Entry>;
    /// Whether the lock is held back from every new holder: by a lock-delay.
    fn is_held_back(&self) -> bool;
}

/// The decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueVerdict {
    /// Grant it. `Some`: a re-entry, with the fence that its owner already has.
    Grant(Option<Fence>),
    /// It must wait.
    Wait,
}

/// Evaluates a request against the queues of all its names. `owner`: the hash of its owner. `base`: the fence base. `waits`: the request was
/// found blocked before.
///
/// # Errors
/// [`Error::Deadlock`] if the request would wait for itself, [`Error::Lost`] if it would re-enter a hold that was revoked.
pub fn evaluate_request<Q: RequestQueue>(
    request: &LockRequest,
    owner: Option<Owner>,
    queues: &[Q],
    base: u64,
    waits: bool,
) -> Result<QueueVerdict> {
    refuse_self_wait(request, owner, queues)?;
    let each = queues.iter().map(|queue| match evaluate(owner, request.mode, queue.active_holds(base)) {
        // A lock-delay, and every waiter ahead, comes first.
        Admission::Free if queue.is_held_back() || queue.waiting_ahead().next().is_some() => {
            Ok(Admission::Blocked)
        }
        // A foreign client that waits takes the lock when the first hold ends.
        Admission::Reenter(_) if queue.waiting_ahead().any(AdmissionEntry::is_foreign) => {
            Err(Error::Deadlock(vec![queue.name().clone()]))
        }
        admission => Ok(admission),
    });
    match evaluate_all(request, waits, each)? {
        Admission::Free => Ok(QueueVerdict::Grant(None)),
        Admission::Reenter(fence) => {
            // An owner whose hold is revoked cannot re-enter it.
            let mut own = queues.iter().flat_map(|queue| queue.other_holders());
            let revoked = own.find_map(|entry| entry.revoked().filter(|_| entry.fence(base) == fence));
            revoked.map_or(Ok(QueueVerdict::Grant(Some(fence))), |reason| Err(revoked_error(reason)))
        }
        Admission::Upgrade => Err(Error::Deadlock(request.key.names.as_slice().to_vec())),
        Admission::Blocked => Ok(QueueVerdict::Wait),
    }
}

/// Refuses a request whose owner waits ahead of it for a part of the same names, or in a weaker mode: it would wait for itself.
fn refuse_self_wait<Q: RequestQueue>(
    request: &LockRequest,
    owner: Option<Owner>,
    queues: &[Q],
) -> Result<()> {
    if owner.is_none() {
        return Ok(());
    }
    // The requests of this owner, each with the names in whose queues it is ahead.
    let mut earlier: BTreeMap<AttemptHash, (Mode, Vec<LockName>)> = BTreeMap::new();
    for queue in queues {
        for entry in queue.waiting_ahead().filter(|entry| entry.owner() == owner && entry.is_waiting()) {
            let Some(attempt) = entry.attempt() else { continue };
            earlier.entry(attempt).or_insert((entry.mode(), Vec::new())).1.push(queue.name().clone());
        }
    }
    for (mode, common) in earlier.into_values() {
        let hold = ActiveHold { owner, mode, fence: Fence::MIN };
        let covers = evaluate(owner, request.mode, std::iter::once(hold)) == Admission::Reenter(Fence::MIN);
        if common.len() < request.key.names.count() || !covers {
            return Err(Error::Deadlock(common));
        }
    }
    Ok(())
}

/// The error for an attempt or an owner whose hold was revoked for this reason: it cannot acquire again before it has released.
pub fn revoked_error(reason: &str) -> Error {
    Error::Lost(LossReason::Revoked(reason.into()).to_string())
}

/// Whether two requests of these modes may hold a lock together. If so, the grant of the one ahead may admit the other.
pub fn may_share(mode: Mode, ahead: Mode) -> bool {
    matches!((mode, ahead), (Mode::Shared, Mode::Shared) | (Mode::Permit(_), Mode::Permit(_)))
}
