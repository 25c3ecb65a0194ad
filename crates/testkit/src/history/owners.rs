//! C7: only the owner renews and releases.

use std::collections::{BTreeMap, HashMap, VecDeque};

use lockkeeper_core::Mode;

use super::holds::{HeldInterval, holds};
use super::{History, HistoryEvent, Operation, OperationPhase, Rule, Violation};

/// C7: only the owner renews and releases. A lock that no client requested, that was released already, or that another
/// client held all the while, is never renewed or released with success.
pub fn owners(history: &History) -> Vec<Violation> {
    let locks = holds(history);
    let covers: BTreeMap<&str, Cover<'_>> =
        locks.iter().map(|(lock, holds)| (*lock, Cover::new(holds))).collect();
    let mut requests: HashMap<OwnerKey<'_>, OwnerRequest<'_>> = HashMap::new();
    let mut found = Vec::new();
    for event in history.events() {
        let Some(attempt) = event.attempt.as_deref() else { continue };
        let request = requests.entry((&event.lock, &event.proc, attempt)).or_default();
        match (event.op, event.phase) {
            (Operation::Acquire, phase) => {
                // A request after a release is another one with the same fingerprint by chance.
                if phase == OperationPhase::Invoke && request.released.is_some() {
                    *request = OwnerRequest::default();
                }
                request.asked = true;
                request.granted |= phase == OperationPhase::Ok;
                request.owner = request.owner.or(event.owner.as_deref());
            }
            (Operation::Renew | Operation::Release, OperationPhase::Invoke) => {
                request.open(event.op).push_back(event)
            }
            (Operation::Renew | Operation::Release, _) => {
                let begun = request.open(event.op).pop_front();
                if event.phase == OperationPhase::Ok {
                    let cover = covers.get(&*event.lock);
                    found.extend(request.check(begun.unwrap_or(event), event, cover));
                }
            }
            _ => {}
        }
    }
    found
}

type OwnerKey<'h> = (&'h str, &'h str, &'h str);

/// The state of one attempt so far.
#[derive(Default)]
struct OwnerRequest<'h> {
    asked: bool,
    granted: bool,
    owner: Option<&'h str>,
    released: Option<&'h HistoryEvent>,
    renewing: VecDeque<&'h HistoryEvent>,
    releasing: VecDeque<&'h HistoryEvent>,
}

impl<'h> OwnerRequest<'h> {
    fn open(&mut self, op: Operation) -> &mut VecDeque<&'h HistoryEvent> {
        if op == Operation::Renew { &mut self.renewing } else { &mut self.releasing }
    }

    fn check(
        &mut self,
        begun: &'h HistoryEvent,
        done: &'h HistoryEvent,
        cover: Option<&Cover<'_>>,
    ) -> Option<Violation> {
        let what = if done.op == Operation::Renew { "renewed" } else { "released" };
        let text = |why: &str| format!("{:?} was {what} {why}", done.lock);
        let violation = |why: &str, other| Some(Violation::new(Rule::Owner, text(why), [other, Some(done)]));
        if !self.asked {
            return violation("by an attempt that never asked for it", None);
        }
        if let Some(before) =
            self.released.filter(|before| done.op == Operation::Release || before.t < begun.t)
        {
            return violation("after it had been released", Some(before));
        }
        if done.op == Operation::Release {
            self.released = Some(done);
        }
        // A request that was never granted may have left the queue while another client held the lock.
        let holder = cover.filter(|_| self.granted)?.holder(begun, done, self.owner)?;
        violation("by one who did not hold it any more", holder.granted)
    }
}

/// Answers in O(log n) who else held the lock exclusively during the whole of a span.
struct Cover<'a> {
    /// By beginning; with each the two that last longest of those that began by then, of two different owners.
    rows: Vec<(u64, Two<'a>)>,
}

impl<'a> Cover<'a> {
    fn new(holds: &'a [HeldInterval<'a>]) -> Self {
        let exclusive = holds.iter().filter(|hold| hold.granted.is_some() && hold.mode() == Mode::Exclusive);
        let mut sorted: Vec<&HeldInterval<'_>> = exclusive.collect();
        sorted.sort_by_key(|hold| hold.from());
        let mut best = [None; 2];
        let rows = sorted.into_iter().map(|hold| {
            best = longest(best, hold);
            (hold.from(), best)
        });
        Cover { rows: rows.collect() }
    }

    fn holder(
        &self,
        begun: &HistoryEvent,
        done: &HistoryEvent,
        owner: Option<&str>,
    ) -> Option<&'a HeldInterval<'a>> {
        let before = self.rows.partition_point(|(from, _)| *from <= begun.t);
        let (_, best) = self.rows.get(before.checked_sub(1)?)?;
        best.iter().copied().flatten().find(|hold| {
            let mine = hold.asked.proc == done.proc && hold.asked.attempt == done.attempt;
            let ours = owner.is_some() && hold.owner() == owner;
            !mine && !ours && hold.until() >= done.t
        })
    }
}

type Two<'a> = [Option<&'a HeldInterval<'a>>; 2];

/// Keeps the two that last longest. They are of different owners: otherwise both could be of the one that asks.
fn longest<'a>([first, second]: Two<'a>, new: &'a HeldInterval<'a>) -> Two<'a> {
    let same = first.is_some_and(|first| first.same_owner(new));
    let longer = |than: Option<&HeldInterval<'_>>| than.is_none_or(|than| than.until() < new.until());
    match (longer(first), same) {
        (true, true) => [Some(new), second],
        (true, false) => [Some(new), first],
        (false, false) if longer(second) => [first, Some(new)],
        _ => [first, second],
    }
}
