use std::collections::{BTreeMap, HashMap, VecDeque};

use lockkeeper_core::Mode;

use super::holds::{Hold, holds};
use super::{Event, History, Op, Phase, Rule, Violation};

/// C7: only the owner renews and releases. What nobody asked for, what was released already, or what somebody else
/// held all the while, is never renewed or released with success.
pub fn owners(history: &History) -> Vec<Violation> {
    let locks = holds(history);
    let covers: BTreeMap<&str, Cover<'_>> =
        locks.iter().map(|(lock, holds)| (*lock, Cover::new(holds))).collect();
    let mut asks: HashMap<Key<'_>, Ask<'_>> = HashMap::new();
    let mut found = Vec::new();
    for event in history.events() {
        let Some(attempt) = event.attempt.as_deref() else { continue };
        let ask = asks.entry((&event.lock, &event.proc, attempt)).or_default();
        match (event.op, event.phase) {
            (Op::Acquire, phase) => {
                // An ask after a release is another one whose fingerprint happens to be the same.
                if phase == Phase::Invoke && ask.released.is_some() {
                    *ask = Ask::default();
                }
                ask.asked = true;
                ask.granted |= phase == Phase::Ok;
                ask.owner = ask.owner.or(event.owner.as_deref());
            }
            (Op::Renew | Op::Release, Phase::Invoke) => ask.open(event.op).push_back(event),
            (Op::Renew | Op::Release, _) => {
                let begun = ask.open(event.op).pop_front();
                if event.phase == Phase::Ok {
                    let cover = covers.get(&*event.lock);
                    found.extend(ask.judge(begun.unwrap_or(event), event, cover));
                }
            }
            _ => {}
        }
    }
    found
}

type Key<'h> = (&'h str, &'h str, &'h str);

/// What is known of one attempt so far.
#[derive(Default)]
struct Ask<'h> {
    asked: bool,
    granted: bool,
    owner: Option<&'h str>,
    released: Option<&'h Event>,
    renewing: VecDeque<&'h Event>,
    releasing: VecDeque<&'h Event>,
}

impl<'h> Ask<'h> {
    fn open(&mut self, op: Op) -> &mut VecDeque<&'h Event> {
        if op == Op::Renew { &mut self.renewing } else { &mut self.releasing }
    }

    fn judge(&mut self, begun: &'h Event, done: &'h Event, cover: Option<&Cover<'_>>) -> Option<Violation> {
        let what = if done.op == Op::Renew { "renewed" } else { "released" };
        let text = |why: &str| format!("{:?} was {what} {why}", done.lock);
        let violation = |why: &str, other| Some(Violation::new(Rule::Owner, text(why), [other, Some(done)]));
        if !self.asked {
            return violation("by an attempt that never asked for it", None);
        }
        if let Some(before) = self.released.filter(|before| done.op == Op::Release || before.t < begun.t) {
            return violation("after it had been released", Some(before));
        }
        if done.op == Op::Release {
            self.released = Some(done);
        }
        // One that was never granted may have left the line while somebody else held the lock.
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
    fn new(holds: &'a [Hold<'a>]) -> Self {
        let exclusive = holds.iter().filter(|hold| hold.granted.is_some() && hold.mode() == Mode::Exclusive);
        let mut sorted: Vec<&Hold<'_>> = exclusive.collect();
        sorted.sort_by_key(|hold| hold.from());
        let mut best = [None; 2];
        let rows = sorted.into_iter().map(|hold| {
            best = longest(best, hold);
            (hold.from(), best)
        });
        Cover { rows: rows.collect() }
    }

    fn holder(&self, begun: &Event, done: &Event, owner: Option<&str>) -> Option<&'a Hold<'a>> {
        let before = self.rows.partition_point(|(from, _)| *from <= begun.t);
        let (_, best) = self.rows.get(before.checked_sub(1)?)?;
        best.iter().copied().flatten().find(|hold| {
            let mine = hold.asked.proc == done.proc && hold.asked.attempt == done.attempt;
            let ours = owner.is_some() && hold.owner() == owner;
            !mine && !ours && hold.until() >= done.t
        })
    }
}

type Two<'a> = [Option<&'a Hold<'a>>; 2];

/// Keeps the two that last longest. They are of different owners: otherwise both could be of the one that asks.
fn longest<'a>([first, second]: Two<'a>, new: &'a Hold<'a>) -> Two<'a> {
    let same = first.is_some_and(|first| first.same_owner(new));
    let longer = |than: Option<&Hold<'_>>| than.is_none_or(|than| than.until() < new.until());
    match (longer(first), same) {
        (true, true) => [Some(new), second],
        (true, false) => [Some(new), first],
        (false, false) if longer(second) => [first, Some(new)],
        _ => [first, second],
    }
}
