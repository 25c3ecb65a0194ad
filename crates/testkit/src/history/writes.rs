//! C3: the fenced resource took the writes that it should, in the order of their fences.

use std::collections::HashMap;

use super::{History, HistoryEvent, Operation, OperationPhase, Rule, Violation};
use crate::resource::Accepted;

/// How often one write was begun, and how it ended.
#[derive(Default)]
struct WriteFate<'h> {
    begun: usize,
    done: Vec<&'h HistoryEvent>,
    refused: Option<&'h HistoryEvent>,
    unknown: bool,
}

/// C3: the resource that the lock protects took writes in the order of their fences only; it took what it said it took,
/// and nothing else. `accepted` is its own log.
pub fn resource(history: &History, lock: &str, accepted: &[Accepted]) -> Vec<Violation> {
    let fates = fates(history, lock);
    let mut found = out_of_order(&fates, accepted);
    let mut taken: HashMap<(u64, &str), usize> = HashMap::new();
    for write in accepted {
        *taken.entry((write.fence.get(), &write.value)).or_default() += 1;
    }
    for (write, fate) in &fates {
        let times = taken.remove(write).unwrap_or(0);
        found.extend(check(lock, *write, fate, times));
    }
    let strange = taken.into_keys().map(|(fence, value)| {
        let text =
            format!("the resource of {lock:?} took {value:?} with fence {fence}, which no client wrote");
        Violation::new(Rule::Resource, text, [])
    });
    found.extend(strange);
    found
}

fn fates<'h>(history: &'h History, lock: &str) -> HashMap<(u64, &'h str), WriteFate<'h>> {
    let mut fates: HashMap<(u64, &str), WriteFate<'_>> = HashMap::new();
    let writes = history.events().iter().filter(|event| event.op == Operation::Write && event.lock == lock);
    for event in writes {
        let key = (event.fence.unwrap_or(0), event.value.as_deref().unwrap_or_default());
        let fate = fates.entry(key).or_default();
        match event.phase {
            OperationPhase::Invoke => fate.begun += 1,
            OperationPhase::Ok => fate.done.push(event),
            OperationPhase::Fail => fate.refused = Some(event),
            OperationPhase::Info => fate.unknown = true,
        }
    }
    fates
}

fn check(lock: &str, (fence, value): (u64, &str), fate: &WriteFate<'_>, times: usize) -> Option<Violation> {
    let what = format!("{value:?} with fence {fence} on {lock:?}");
    let violation = |text: String, event| Some(Violation::new(Rule::Resource, text, [event]));
    // A process that was killed in the middle left a beginning without an end: it may have been done too.
    let ended = fate.done.len() + usize::from(fate.refused.is_some());
    if times < fate.done.len() {
        violation(format!("{what} was acknowledged and is lost"), fate.done.last().copied())
    } else if times > fate.begun.max(fate.done.len()) {
        violation(format!("{what} was written {} times and taken {times} times", fate.begun), None)
    } else if times > fate.done.len() && fate.refused.is_some() && !fate.unknown && ended >= fate.begun {
        violation(format!("{what} was refused and taken all the same"), fate.refused)
    } else {
        None
    }
}

fn out_of_order(fates: &HashMap<(u64, &str), WriteFate<'_>>, accepted: &[Accepted]) -> Vec<Violation> {
    let event = |write: &Accepted| {
        let fate = fates.get(&(write.fence.get(), &*write.value));
        fate.and_then(|fate| fate.done.first().copied())
    };
    let stale = stale_writes(accepted).map(|(newer, stale)| {
        let text = format!("fence {} was taken after fence {}", stale.fence, newer.fence);
        Violation::new(Rule::Resource, text, [event(newer), event(stale)])
    });
    stale.collect()
}

/// The writes that a resource took after one with a higher fence, each with that one. On the twin without a fence
/// there have to be some: otherwise the fault did not bite, and the fence was not tested.
pub fn stale_writes(accepted: &[Accepted]) -> impl Iterator<Item = (&Accepted, &Accepted)> {
    let mut highest: Option<&Accepted> = None;
    accepted.iter().filter_map(move |write| match highest {
        Some(newer) if newer.fence > write.fence => Some((newer, write)),
        _ => {
            highest = Some(write);
            None
        }
    })
}
