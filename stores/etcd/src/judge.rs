//! Who may have it: the one rule of admission, applied to the lines as they were read.

use lockkeeper_core::rules::{Stake, Verdict, judge, judge_all};
use lockkeeper_core::{Ask, Busy, Error, Fence, LockName, LockView, Mode, Result, Wait};

use crate::entry::{Line, One, State};
use crate::layout::{Mark, owner_mark};
use crate::revoke::lost;

/// What the lines say about an ask.
#[derive(Debug)]
pub enum Said {
    /// It may have it. `Some`: with the fence that its owner has already.
    Yes(Option<Fence>),
    /// It must wait.
    No,
}

/// Judges an ask against the lines of all its names. `joined`: it stands in line already.
pub fn say(ask: &Ask, mark: &Mark, lines: &[Line], base: u64, joined: bool) -> Result<Said> {
    refuse_self_wait(ask, mark, lines)?;
    let owner = ask.owner.as_ref().map(owner_mark);
    let each = lines.iter().map(|line| {
        let verdict = judge(owner, ask.mode, line.other_holders(mark).map(|one| one.stake(base)));
        match verdict {
            // Whoever is held back, or stands further in front, comes first.
            Verdict::Free if in_front(line, mark).next().is_some() => Ok(Verdict::Blocked),
            // A foreign client that waits takes the lock once the first hold is gone, whatever we think of the second.
            Verdict::Reenter(_) if in_front(line, mark).any(One::is_foreign) => {
                Err(Error::Deadlock(vec![line.name.clone()]))
            }
            verdict => Ok(verdict),
        }
    });
    match judge_all(ask, joined, each)? {
        Verdict::Free => Ok(Said::Yes(None)),
        Verdict::Reenter(fence) => {
            // An owner that is to give back what it holds cannot enter it again.
            let own = lines.iter().flat_map(|line| line.other_holders(mark));
            let revoked = own.filter(|one| one.fence(base) == fence).find_map(One::revoked);
            revoked.map_or(Ok(Said::Yes(Some(fence))), |reason| Err(lost(reason)))
        }
        Verdict::Upgrade => Err(Error::Deadlock(ask.claim.names.as_slice().to_vec())),
        Verdict::Blocked => Ok(Said::No),
    }
}

/// The hold under which its owner may enter once more, with this fence.
pub fn entered<'a>(ask: &Ask, mark: &'a Mark, line: &'a Line, base: u64, fence: Fence) -> Option<&'a One> {
    let owner = ask.owner.as_ref().map(owner_mark);
    let lets_in = |one: &&One| judge(owner, ask.mode, std::iter::once(one.stake(base)));
    line.other_holders(mark).find(|one| lets_in(one) == Verdict::Reenter(fence))
}

/// Those who do not hold and come before it.
fn in_front<'a>(line: &'a Line, mark: &'a Mark) -> impl Iterator<Item = &'a One> {
    let mine = line.mine(mark).map_or(i64::MAX, |one| one.created);
    line.all.iter().filter(move |one| {
        let before = one.created < mine && one.mark.as_ref() != Some(mark);
        one.is(State::Delayed) || (before && !line.holds(one))
    })
}

/// The one to wait for in this line: before it is gone, or lets others in, the ask is not served. `None`: nobody is in the way.
pub fn in_the_way<'a>(ask: &Ask, mark: &'a Mark, line: &'a Line, base: u64) -> Option<&'a One> {
    if let Some(before) = in_front(line, mark).last() {
        return Some(before);
    }
    let owner = ask.owner.as_ref().map(owner_mark);
    let others = || line.other_holders(mark);
    match judge(owner, ask.mode, others().map(|one| one.stake(base))) {
        Verdict::Blocked => others().filter(|one| !may_share(ask.mode, one)).last().or(others().last()),
        _ => None,
    }
}

/// Whether news of `one` that is not its end could let an ask of this mode in: its own grant, where both can hold.
pub fn may_share(mode: Mode, one: &One) -> bool {
    let theirs = one.entry.as_ref().map_or(Mode::Exclusive, |entry| entry.mode);
    matches!((mode, theirs), (Mode::Shared, Mode::Shared) | (Mode::Permit(_), Mode::Permit(_)))
}

/// An ask whose owner waits in front of it for part of the same, or for less, would wait for itself.
fn refuse_self_wait(ask: &Ask, mark: &Mark, lines: &[Line]) -> Result<()> {
    let Some(owner) = ask.owner.as_ref().map(owner_mark) else { return Ok(()) };
    let earlier = |line: &Line| -> Vec<(Mark, Mode)> {
        let found = in_front(line, mark).filter(|one| one.owner() == Some(owner) && one.is(State::Waiting));
        found.filter_map(|one| Some((one.mark?, one.entry.as_ref()?.mode))).collect()
    };
    let each: Vec<(LockName, Vec<(Mark, Mode)>)> =
        lines.iter().map(|line| (line.name.clone(), earlier(line))).collect();
    let others: std::collections::BTreeMap<Mark, Mode> =
        each.iter().flat_map(|(_, found)| found.iter().copied()).collect();
    for (other, mode) in others {
        let common: Vec<LockName> = each
            .iter()
            .filter(|(_, found)| found.iter().any(|(found, _)| *found == other))
            .map(|(name, _)| name.clone())
            .collect();
        let stake = Stake { owner: Some(owner), mode, fence: Fence::MIN };
        let covers = matches!(judge(Some(owner), ask.mode, std::iter::once(stake)), Verdict::Reenter(_));
        if common.len() < ask.claim.names.count() || !covers {
            return Err(Error::Deadlock(common));
        }
    }
    Ok(())
}

/// Whether what was read of a long line is enough. An exclusive request without an owner is blocked by any holder and any waiter in
/// front of it: one of them proves that it must wait. That nobody is in the way is proved only by a read that shows every holder.
pub fn is_enough(ask: &Ask, mark: &Mark, line: &Line) -> bool {
    if line.unread == 0 {
        return true;
    }
    let blocked = || in_front(line, mark).next().is_some() || line.other_holders(mark).next().is_some();
    is_simple(ask) && line.knows_before(mark, ask.wait != Wait::No) && (line.knows_holders() || blocked())
}

/// Whether any other holder, and any waiter in front, keeps this request out.
pub fn is_simple(ask: &Ask) -> bool {
    ask.mode == Mode::Exclusive && ask.owner.is_none()
}

/// Who is in the way, for an ask whose patience is over.
pub fn busy(ask: &Ask, mark: &Mark, lines: &[Line], base: u64) -> Busy {
    let blocked = lines.iter().find(|line| in_the_way(ask, mark, line, base).is_some()).unwrap_or(&lines[0]);
    let others = |one: &&One| one.mark.as_ref() != Some(mark);
    let held = blocked.holders().filter(others).take(LockView::BUSY);
    Busy {
        name: blocked.name.clone(),
        held: held.map(|one| one.held(base, one.entry.as_ref().map_or(0, |entry| entry.ttl_ms))).collect(),
        waiting: blocked.waiters().filter(others).count() + blocked.unread,
    }
}
