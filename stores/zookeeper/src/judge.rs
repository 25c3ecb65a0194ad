//! Who may have it: the one rule of admission, applied to the lines as they were read.

use lockkeeper_core::lease::Why;
use lockkeeper_core::rules::{Stake, Verdict, judge, judge_all};
use lockkeeper_core::{Ask, Busy, Error, Fence, LockName, LockView, Mode, Result};

use crate::entry::State;
use crate::layout::{Mark, owner_mark};
use crate::line::{Line, One};

/// What the lines say about an ask.
#[derive(Debug)]
pub enum Said {
    /// It may have it. `Some`: with the fence that its owner has already.
    Yes(Option<lockkeeper_core::Fence>),
    /// It must wait.
    No,
}

/// Judges an ask against the lines of all its names. `own` are its nodes. Nobody can come in front of it later, so what
/// is free now stays free; only a re-entry passes the line, and it makes sure that what it re-enters is still there. `waits`: it has been told already that it must.
pub fn say(ask: &Ask, own: &[String], lines: &[Line], base: u64, waits: bool) -> Result<Said> {
    refuse_self_wait(ask, own, lines)?;
    let owner = ask.owner.as_ref().map(owner_mark);
    let each = lines.iter().zip(own).map(|(line, own)| {
        let verdict = judge(owner, ask.mode, line.stakes(base, own));
        match verdict {
            // Whoever is held back, or stands further in front, comes first.
            Verdict::Free if in_front(line, own).next().is_some() || is_held_back(line) => {
                Ok(Verdict::Blocked)
            }
            // A foreign client that waits takes the lock once the first hold is gone, whatever we think of the second.
            Verdict::Reenter(_) if in_front(line, own).any(One::is_foreign) => {
                Err(Error::Deadlock(vec![line.name.clone()]))
            }
            verdict => Ok(verdict),
        }
    });
    match judge_all(ask, waits, each)? {
        Verdict::Free => Ok(Said::Yes(None)),
        Verdict::Reenter(fence) => match revoked(lines, base, fence) {
            Some(reason) => Err(lost(reason)),
            None => Ok(Said::Yes(Some(fence))),
        },
        Verdict::Upgrade => Err(Error::Deadlock(ask.claim.names.as_slice().to_vec())),
        Verdict::Blocked => Ok(Said::No),
    }
}

/// Why an owner that has this fence is to give it back, if it is.
fn revoked(lines: &[Line], base: u64, fence: Fence) -> Option<&str> {
    let own = lines.iter().flat_map(Line::holders).filter(|one| one.fence(base) == fence);
    own.filter_map(One::revoked).next()
}

/// What an attempt or an owner is told that is to give the lock back: it cannot begin anew.
pub fn lost(reason: &str) -> Error {
    Error::Lost(Why::Revoked(reason.into()).to_string())
}

fn is_held_back(line: &Line) -> bool {
    line.backs.iter().any(|back| !back.lingers())
}

/// Those who do not hold and come before it.
fn in_front<'a>(line: &'a Line, own: &str) -> impl Iterator<Item = &'a One> {
    let place = line.place(own).unwrap_or(line.all.len());
    line.all[..place].iter().filter(|one| !line.holds(one))
}

/// The one to wait for: the last that came before it and is still there. `None`: nobody does.
pub fn predecessor<'a>(line: &'a Line, own: &str) -> Option<&'a One> {
    let place = line.place(own).unwrap_or(line.all.len());
    // A hold that re-entered past the line came later, and is in the way all the same.
    let later = line.all.iter().skip(place + 1).find(|one| one.is(State::Granted));
    line.all[..place].last().or(later)
}

/// The one whose grant or end may let a request in that can share the lock: the last in front of it that was not seen to hold. The nodes are
/// not read at one moment, so one that stands further behind may have been seen to hold already.
pub fn awaited<'a>(mode: Mode, line: &'a Line, own: &str) -> Option<&'a One> {
    let in_front = in_front(line, own).last().filter(|_| mode != Mode::Exclusive);
    in_front.or_else(|| predecessor(line, own))
}

/// Whether news of `one` that is not its end could let an ask of this mode in: its own grant, where both can hold.
pub fn may_share(mode: Mode, one: &One) -> bool {
    matches!((mode, one.mode()), (Mode::Shared, Mode::Shared) | (Mode::Permit(_), Mode::Permit(_)))
}

/// An ask whose owner waits in front of it for part of the same, or for less, would wait for itself.
fn refuse_self_wait(ask: &Ask, own: &[String], lines: &[Line]) -> Result<()> {
    let Some(owner) = ask.owner.as_ref().map(owner_mark) else { return Ok(()) };
    let earlier = |line: &Line, own: &str| -> Vec<(Mark, Mode)> {
        let found = in_front(line, own).filter(|one| one.owner() == Some(owner) && one.is(State::Waiting));
        found.filter_map(|one| Some((one.mark?, one.mode()))).collect()
    };
    let each: Vec<(LockName, Vec<(Mark, Mode)>)> =
        lines.iter().zip(own).map(|(line, own)| (line.name.clone(), earlier(line, own))).collect();
    let others: std::collections::BTreeMap<Mark, Mode> =
        each.iter().flat_map(|(_, found)| found.iter().copied()).collect();
    for (other, mode) in others {
        let common: Vec<LockName> = each
            .iter()
            .filter(|(_, found)| found.iter().any(|(found, _)| *found == other))
            .map(|(name, _)| name.clone())
            .collect();
        let stake = Stake { owner: Some(owner), mode, fence: lockkeeper_core::Fence::MIN };
        let covers = matches!(judge(Some(owner), ask.mode, std::iter::once(stake)), Verdict::Reenter(_));
        if common.len() < ask.claim.names.count() || !covers {
            return Err(Error::Deadlock(common));
        }
    }
    Ok(())
}

/// Who is in the way, for an ask whose patience is over.
pub fn busy(own: &[String], lines: &[Line], base: u64) -> Busy {
    let blocks = |(line, own): &(&Line, &String)| predecessor(line, own).is_some() || !line.backs.is_empty();
    let (blocked, own) = lines.iter().zip(own).find(blocks).unwrap_or((&lines[0], &own[0]));
    let held = blocked.holders().filter(|one| one.path != *own).map(|one| one.held(base));
    let kept = blocked.backs.iter().filter_map(|back| back.held());
    Busy {
        name: blocked.name.clone(),
        held: held.chain(kept).take(LockView::BUSY).collect(),
        waiting: blocked.waiters().filter(|one| one.path != *own).count(),
    }
}
