//! The admission rule: which requests may hold a lock together. The lock table uses it, and every store that decides admission itself.

use smallvec::SmallVec;

use crate::{Error, Fence, LockName, LockRequest, Mode, Owner, Result};

/// One hold of a lock.
#[derive(Clone, Copy, Debug)]
pub struct ActiveHold {
    /// Its explicit owner, if it has one and has not released it.
    pub owner: Option<Owner>,
    /// How it holds.
    pub mode: Mode,
    /// Its fence. Re-entrant holds of one owner share it.
    pub fence: Fence,
}

/// The decision of the rule about a request for one name, without regard to its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The request may be granted with a new fence.
    Free,
    /// The owner holds the lock already: one more hold with this fence, past the queue.
    Reenter(Fence),
    /// The owner holds the lock already in a weaker mode: the request would wait for itself.
    Upgrade,
    /// Other holds exclude the request.
    Blocked,
}

/// Evaluates a request against the present holds of the name.
pub fn evaluate(owner: Option<Owner>, mode: Mode, holders: impl Iterator<Item = ActiveHold>) -> Admission {
    let mut verdict = Admission::Free;
    let mut mine = false;
    let mut limit = match mode {
        Mode::Permit(n) => n,
        _ => u32::MAX,
    };
    // Re-entrant holds share a fence: they are one permit. Where holds are ordered by arrival, other holds may be between them.
    let mut permits: SmallVec<[Fence; 16]> = SmallVec::new();
    for hold in holders {
        if owner.is_some() && hold.owner == owner {
            if covers(hold.mode, mode) {
                return Admission::Reenter(hold.fence);
            }
            // Another hold of this owner may still cover the requested mode.
            mine = true;
            continue;
        }
        match (mode, hold.mode) {
            (Mode::Shared, Mode::Shared) => {}
            (Mode::Permit(_), Mode::Permit(n)) => {
                limit = limit.min(n);
                if permits.last() != Some(&hold.fence) {
                    permits.push(hold.fence);
                }
            }
            _ => verdict = Admission::Blocked,
        }
    }
    if permits.len() >= limit as usize {
        permits.sort_unstable();
        permits.dedup();
    }
    match verdict {
        _ if mine => Admission::Upgrade,
        _ if permits.len() >= limit as usize => Admission::Blocked,
        verdict => verdict,
    }
}

/// The decision of the rule about all names of a request together. `each` is the result for each name, with its queue and lock-delay taken into
/// account. `waits`: the request is in the queue already.
pub fn evaluate_all(
    request: &LockRequest,
    waits: bool,
    each: impl Iterator<Item = Result<Admission>>,
) -> Result<Admission> {
    let mut blocked = false;
    let (mut mine, mut fence) = (0, None);
    for verdict in each {
        match verdict? {
            Admission::Upgrade => return Ok(Admission::Upgrade),
            Admission::Reenter(one) => {
                mine += 1;
                blocked |= fence.is_some_and(|other| other != one);
                fence = Some(one);
            }
            Admission::Blocked => blocked = true,
            Admission::Free => {}
        }
    }
    match fence {
        Some(fence) if mine == request.key.names.count() && !blocked => Ok(Admission::Reenter(fence)),
        // A grant has one fence, so it cannot have some names with the old fence and some with a new one.
        Some(_) if !waits => Err(Error::invalid(format!(
            "this owner holds some of {} already, but not all of them under one fence: request all names at once, \
             or for the missing ones alone",
            request.key.names
        ))),
        Some(_) => Ok(Admission::Blocked),
        None if blocked => Ok(Admission::Blocked),
        None => Ok(Admission::Free),
    }
}

/// Refuses a request that would wait for its own owner. `earlier` are the queued requests of that owner: once one of them for the same names is
/// granted, this request either re-enters, or would wait for it for ever.
pub fn refuse_self_wait<'a>(
    earlier: impl Iterator<Item = &'a LockRequest>,
    request: &LockRequest,
) -> Result<()> {
    for earlier in earlier {
        let theirs = earlier.key.names.as_slice();
        let common: Vec<LockName> =
            request.key.names.iter().filter(|name| theirs.binary_search(name).is_ok()).cloned().collect();
        let reenters = common.len() == request.key.names.count() && covers(earlier.mode, request.mode);
        if !common.is_empty() && !reenters {
            return Err(Error::Deadlock(common));
        }
    }
    Ok(())
}

fn covers(held: Mode, asked: Mode) -> bool {
    match (held, asked) {
        (Mode::Exclusive, _) | (Mode::Shared, Mode::Shared) => true,
        // One of fewer permits excludes more than one of many, so it could exclude present holders and waiters.
        (Mode::Permit(held), Mode::Permit(asked)) => asked >= held,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::{Attempt, Holder, LockName, Names};

    fn hold(owner: u8, mode: Mode, fence: u64) -> ActiveHold {
        let owner = (owner > 0).then(|| Owner::from_bytes([owner; 16]));
        ActiveHold { owner, mode, fence: Fence::new(fence).unwrap() }
    }

    #[test]
    fn permits_of_different_size_keep_to_the_smallest() {
        let held = [hold(0, Mode::Permit(5), 1), hold(0, Mode::Permit(2), 2)];
        assert_eq!(evaluate(None, Mode::Permit(5), held.into_iter()), Admission::Blocked);
        assert_eq!(evaluate(None, Mode::Permit(5), held.into_iter().take(1)), Admission::Free);
        assert_eq!(evaluate(None, Mode::Permit(1), held.into_iter().take(1)), Admission::Blocked);
    }

    #[test]
    fn who_holds_some_of_the_names_is_refused_unless_it_waits_already() {
        let names = Names::new(["a", "b"].map(|name| LockName::new(name).unwrap())).unwrap();
        let holder = Arc::new(Holder::new("host", 1, None).unwrap());
        let request = LockRequest::new(Attempt::from_bytes([1; 16]), names, Duration::from_secs(1), holder);
        let some = || [Admission::Reenter(Fence::MIN), Admission::Free].map(Ok).into_iter();
        assert!(matches!(evaluate_all(&request, false, some()), Err(Error::Invalid(_))));
        // It waits for what others hold. Its own hold of the rest may end meanwhile.
        assert_eq!(evaluate_all(&request, true, some()).unwrap(), Admission::Blocked);
    }

    #[test]
    fn reentrant_holds_are_one_permit() {
        let held = [hold(1, Mode::Permit(2), 7), hold(1, Mode::Permit(2), 7)];
        assert_eq!(evaluate(None, Mode::Permit(2), held.into_iter()), Admission::Free);
        let between = [hold(1, Mode::Permit(3), 7), hold(2, Mode::Permit(3), 8), hold(1, Mode::Permit(3), 7)];
        assert_eq!(evaluate(None, Mode::Permit(3), between.into_iter()), Admission::Free);
        assert_eq!(evaluate(None, Mode::Permit(2), between.into_iter()), Admission::Blocked);
    }

    #[test]
    fn an_owner_reenters_but_does_not_upgrade() {
        let me = Some(Owner::from_bytes([1; 16]));
        let seven = Fence::new(7).unwrap();
        let request = |mode, held: ActiveHold| evaluate(me, mode, std::iter::once(held));
        assert_eq!(request(Mode::Shared, hold(1, Mode::Exclusive, 7)), Admission::Reenter(seven));
        assert_eq!(request(Mode::Exclusive, hold(1, Mode::Exclusive, 7)), Admission::Reenter(seven));
        assert_eq!(request(Mode::Exclusive, hold(1, Mode::Shared, 7)), Admission::Upgrade);
        assert_eq!(request(Mode::Exclusive, hold(2, Mode::Exclusive, 7)), Admission::Blocked);
        assert_eq!(request(Mode::Exclusive, hold(0, Mode::Exclusive, 7)), Admission::Blocked);
        assert_eq!(request(Mode::Permit(3), hold(1, Mode::Permit(2), 7)), Admission::Reenter(seven));
        assert_eq!(request(Mode::Permit(1), hold(1, Mode::Permit(2), 7)), Admission::Upgrade);
        // The owner re-entered as a reader and as a writer and released its first hold: it still writes.
        let held = [hold(1, Mode::Shared, 7), hold(1, Mode::Exclusive, 7)];
        assert_eq!(evaluate(me, Mode::Exclusive, held.into_iter()), Admission::Reenter(seven));
    }
}
