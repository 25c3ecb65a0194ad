//! Who may join whom: the one rule of admission, used by the lock table and by every store that computes it itself.

use smallvec::SmallVec;

use crate::{Ask, Error, Fence, LockName, Mode, Owner, Result};

/// What one holder has in a lock.
#[derive(Clone, Copy, Debug)]
pub struct Stake {
    /// Its explicit owner, if it has one and has not let go.
    pub owner: Option<Owner>,
    /// How it holds.
    pub mode: Mode,
    /// With which fence. Re-entrant holds of one owner share it.
    pub fence: Fence,
}

/// What the rule says about an ask for one name, the line in front of it left aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may have it, with a new fence.
    Free,
    /// Its owner has it already: one more hold with this fence, past any line.
    Reenter(Fence),
    /// Its owner has it already, but less of it than is asked for now: waiting would be waiting for itself.
    Upgrade,
    /// Others are in the way.
    Blocked,
}

/// Judges an ask against those who hold the name now.
pub fn judge(owner: Option<Owner>, mode: Mode, holders: impl Iterator<Item = Stake>) -> Verdict {
    let mut verdict = Verdict::Free;
    let mut mine = false;
    let mut limit = match mode {
        Mode::Permit(n) => n,
        _ => u32::MAX,
    };
    // Re-entrant holds share a fence: they are one permit. Where holders stand in the order in which they came, others may be between them.
    let mut permits: SmallVec<[Fence; 16]> = SmallVec::new();
    for stake in holders {
        if owner.is_some() && stake.owner == owner {
            if covers(stake.mode, mode) {
                return Verdict::Reenter(stake.fence);
            }
            // Another of its holds may still cover what is asked.
            mine = true;
            continue;
        }
        match (mode, stake.mode) {
            (Mode::Shared, Mode::Shared) => {}
            (Mode::Permit(_), Mode::Permit(n)) => {
                limit = limit.min(n);
                if permits.last() != Some(&stake.fence) {
                    permits.push(stake.fence);
                }
            }
            _ => verdict = Verdict::Blocked,
        }
    }
    if permits.len() >= limit as usize {
        permits.sort_unstable();
        permits.dedup();
    }
    match verdict {
        _ if mine => Verdict::Upgrade,
        _ if permits.len() >= limit as usize => Verdict::Blocked,
        verdict => verdict,
    }
}

/// What the rule says about all names of an ask together, given what it says about each of them, the line in front and a
/// lock-delay taken into account. `waits`: the ask stands in line already.
pub fn judge_all(ask: &Ask, waits: bool, each: impl Iterator<Item = Result<Verdict>>) -> Result<Verdict> {
    let mut blocked = false;
    let (mut mine, mut fence) = (0, None);
    for verdict in each {
        match verdict? {
            Verdict::Upgrade => return Ok(Verdict::Upgrade),
            Verdict::Reenter(one) => {
                mine += 1;
                blocked |= fence.is_some_and(|other| other != one);
                fence = Some(one);
            }
            Verdict::Blocked => blocked = true,
            Verdict::Free => {}
        }
    }
    match fence {
        Some(fence) if mine == ask.claim.names.count() && !blocked => Ok(Verdict::Reenter(fence)),
        // One grant has one fence: part of the names with the old fence and part with a new one cannot be told.
        Some(_) if !waits => Err(Error::invalid(format!(
            "this owner holds some of {} already, but not all of them under one fence: ask for all names at once, \
             or for the missing ones alone",
            ask.claim.names
        ))),
        Some(_) => Ok(Verdict::Blocked),
        None if blocked => Ok(Verdict::Blocked),
        None => Ok(Verdict::Free),
    }
}

/// Refuses an ask that would wait for its own owner. `earlier` are the asks of that owner that stand in line: once one
/// of them for the same names is granted, this one either re-enters, or would wait for it for ever.
pub fn refuse_self_wait<'a>(earlier: impl Iterator<Item = &'a Ask>, ask: &Ask) -> Result<()> {
    for earlier in earlier {
        let theirs = earlier.claim.names.as_slice();
        let common: Vec<LockName> =
            ask.claim.names.iter().filter(|name| theirs.binary_search(name).is_ok()).cloned().collect();
        let reenters = common.len() == ask.claim.names.count() && covers(earlier.mode, ask.mode);
        if !common.is_empty() && !reenters {
            return Err(Error::Deadlock(common));
        }
    }
    Ok(())
}

fn covers(held: Mode, asked: Mode) -> bool {
    match (held, asked) {
        (Mode::Exclusive, _) | (Mode::Shared, Mode::Shared) => true,
        // One of fewer is more than one of many: it would close the door on others who wait or hold already.
        (Mode::Permit(held), Mode::Permit(asked)) => asked >= held,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stake(owner: u8, mode: Mode, fence: u64) -> Stake {
        let owner = (owner > 0).then(|| Owner::from_bytes([owner; 16]));
        Stake { owner, mode, fence: Fence::new(fence).unwrap() }
    }

    #[test]
    fn permits_of_different_size_keep_to_the_smallest() {
        let held = [stake(0, Mode::Permit(5), 1), stake(0, Mode::Permit(2), 2)];
        assert_eq!(judge(None, Mode::Permit(5), held.into_iter()), Verdict::Blocked);
        assert_eq!(judge(None, Mode::Permit(5), held.into_iter().take(1)), Verdict::Free);
        assert_eq!(judge(None, Mode::Permit(1), held.into_iter().take(1)), Verdict::Blocked);
    }

    #[test]
    fn reentrant_holds_are_one_permit() {
        let held = [stake(1, Mode::Permit(2), 7), stake(1, Mode::Permit(2), 7)];
        assert_eq!(judge(None, Mode::Permit(2), held.into_iter()), Verdict::Free);
        let between =
            [stake(1, Mode::Permit(3), 7), stake(2, Mode::Permit(3), 8), stake(1, Mode::Permit(3), 7)];
        assert_eq!(judge(None, Mode::Permit(3), between.into_iter()), Verdict::Free);
        assert_eq!(judge(None, Mode::Permit(2), between.into_iter()), Verdict::Blocked);
    }

    #[test]
    fn an_owner_reenters_but_does_not_upgrade() {
        let me = Some(Owner::from_bytes([1; 16]));
        let seven = Fence::new(7).unwrap();
        let ask = |mode, held: Stake| judge(me, mode, std::iter::once(held));
        assert_eq!(ask(Mode::Shared, stake(1, Mode::Exclusive, 7)), Verdict::Reenter(seven));
        assert_eq!(ask(Mode::Exclusive, stake(1, Mode::Exclusive, 7)), Verdict::Reenter(seven));
        assert_eq!(ask(Mode::Exclusive, stake(1, Mode::Shared, 7)), Verdict::Upgrade);
        assert_eq!(ask(Mode::Exclusive, stake(2, Mode::Exclusive, 7)), Verdict::Blocked);
        assert_eq!(ask(Mode::Exclusive, stake(0, Mode::Exclusive, 7)), Verdict::Blocked);
        assert_eq!(ask(Mode::Permit(3), stake(1, Mode::Permit(2), 7)), Verdict::Reenter(seven));
        assert_eq!(ask(Mode::Permit(1), stake(1, Mode::Permit(2), 7)), Verdict::Upgrade);
        // It took it twice more, as a reader and as a writer, and gave the first back: it is still the writer.
        let held = [stake(1, Mode::Shared, 7), stake(1, Mode::Exclusive, 7)];
        assert_eq!(judge(me, Mode::Exclusive, held.into_iter()), Verdict::Reenter(seven));
    }
}
