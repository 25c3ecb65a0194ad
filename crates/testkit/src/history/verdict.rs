//! The result of all checks of a history, and whether the run proves anything.

use std::collections::HashMap;
use std::fmt;

use super::holds::holds;
use super::{History, HistoryEvent, Operation, OperationPhase, Rule, Violation};

/// C5: nothing is left in the store. `left` names a lock and says what is left of it.
pub fn residue<'l>(history: &History, left: impl IntoIterator<Item = (&'l str, &'l str)>) -> Vec<Violation> {
    let mut last: HashMap<&str, &HistoryEvent> = HashMap::new();
    for event in history.events() {
        last.insert(&event.lock, event);
    }
    let each = left.into_iter().map(|(lock, what)| {
        Violation::new(Rule::Residue, format!("{what} is left of {lock:?}"), [last.get(lock).copied()])
    });
    each.collect()
}

/// C9: what a run has to have seen before it proves anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// At least so many operations came to an end.
    pub operations: usize,
    /// At least so many faults really fired.
    pub faults: u64,
    /// At least so many asks found the lock taken.
    pub contended: usize,
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a verdict is to be read"]
pub enum HistoryVerdict {
    /// All is well, and enough was tried to say so.
    Green,
    /// Rules were broken.
    Red(Vec<Violation>),
    /// Too little happened to prove anything: these were missing.
    Invalid(Vec<String>),
}

impl HistoryVerdict {
    /// Fails the test unless the verdict is green.
    ///
    /// # Panics
    /// If it is not, with all the reasons.
    pub fn assert_green(&self) {
        assert!(*self == HistoryVerdict::Green, "{self}");
    }
}

impl fmt::Display for HistoryVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HistoryVerdict::Green => f.write_str("green"),
            HistoryVerdict::Invalid(missing) => write!(f, "the run proves nothing: {}", missing.join("; ")),
            HistoryVerdict::Red(all) => {
                write!(f, "{} violations", all.len())?;
                // The first ones tell the story; thousands would hide it.
                all.iter().take(20).try_for_each(|violation| write!(f, "\n{violation}"))
            }
        }
    }
}

/// Puts what the checkers found together with what a run has to have seen. `fired` is how many faults really fired.
///
/// A violation counts also in a run in which too little happened.
pub fn verdict(history: &History, demand: Demand, fired: u64, violations: Vec<Violation>) -> HistoryVerdict {
    if !violations.is_empty() {
        return HistoryVerdict::Red(violations);
    }
    let ended = history
        .events()
        .iter()
        .filter(|event| event.op != Operation::Signal && event.phase != OperationPhase::Invoke);
    let seen = [
        ("operations came to an end", ended.count() as u64, demand.operations as u64),
        ("faults fired", fired, demand.faults),
        ("asks found the lock taken", contended(history) as u64, demand.contended as u64),
    ];
    let missing = seen.into_iter().filter(|(_, seen, wanted)| seen < wanted);
    let missing: Vec<String> =
        missing.map(|(what, seen, wanted)| format!("{seen} of at least {wanted} {what}")).collect();
    if missing.is_empty() { HistoryVerdict::Green } else { HistoryVerdict::Invalid(missing) }
}

/// How many requests found the lock held: they were refused, or another client held it between the request and its grant.
pub fn contended(history: &History) -> usize {
    let busy =
        |event: &&HistoryEvent| event.op == Operation::Acquire && event.error.as_deref() == Some("busy");
    let refused = history.events().iter().filter(busy).count();
    let locks = holds(history);
    let waited = locks.values().map(|holds| {
        let lasting: Vec<_> = holds.iter().filter(|hold| hold.from() < hold.until()).collect();
        let mut begun: Vec<u64> = lasting.iter().map(|hold| hold.from()).collect();
        let mut ended: Vec<u64> = lasting.iter().map(|hold| hold.until()).collect();
        begun.sort_unstable();
        ended.sort_unstable();
        // A hold that began before this grant, and had not ended before its request, blocked it.
        let waited = |asked: u64, granted: u64| {
            begun.partition_point(|b| *b < granted) > ended.partition_point(|e| *e <= asked)
        };
        holds
            .iter()
            .filter(|hold| hold.granted.is_some_and(|granted| waited(hold.asked.t, granted.t)))
            .count()
    });
    refused + waited.sum::<usize>()
}
