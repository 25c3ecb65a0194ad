//! C4: a free lock is granted to a waiter within the declared bound.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::holds::holds;
use super::{History, HistoryEvent, Operation, OperationPhase, Pause, Rule, Violation};

/// Two requests that follow each other this soon are one wait.
const RETRY: u64 = 100_000_000;

/// C4: between two moments (in nanoseconds of the boot-time clock), no lock stays without a holder for longer than `bound` while
/// clients wait for it. A client does not wait while it is paused. `waits` tells which requests wait at all.
///
/// A lock that no client ever held exclusively is not judged: others than its holders may keep it from a waiter.
pub fn liveness(
    history: &History,
    pauses: &[Pause],
    (from, until): (u64, u64),
    bound: Duration,
    waits: impl Fn(&HistoryEvent) -> bool,
) -> Vec<Violation> {
    let bound = u64::try_from(bound.as_nanos()).unwrap_or(u64::MAX);
    let waits = time_waited(history, pauses, until, waits);
    let mut found = Vec::new();
    for (lock, holds) in holds(history) {
        let Some(waiting) = waits.get(lock) else { continue };
        let exclusive = holds.iter().all(|hold| hold.mode() == lockkeeper_core::Mode::Exclusive);
        if !exclusive {
            continue;
        }
        let held = holds.iter().filter(|hold| hold.granted.is_some()).map(|hold| (hold.from(), hold.until()));
        let held = union(held.collect(), 0);
        for wait in union(waiting.clone(), RETRY) {
            let wait = (wait.0.max(from), wait.1.min(until));
            for (free, taken) in gaps(wait, &held) {
                if taken - free > bound {
                    let text = format!(
                        "{lock:?} was free for {:.3} s while clients waited; the bound is {:.3} s",
                        (taken - free) as f64 / 1e9,
                        bound as f64 / 1e9
                    );
                    let next = holds.iter().filter_map(|hold| hold.granted).find(|event| event.t >= taken);
                    found.push(Violation::new(Rule::Liveness, text, [next]));
                }
            }
        }
    }
    found
}

type TimeSpan = (u64, u64);

/// When clients that ran waited for each lock.
fn time_waited<'h>(
    history: &'h History,
    pauses: &[Pause],
    until: u64,
    counts: impl Fn(&HistoryEvent) -> bool,
) -> HashMap<&'h str, Vec<TimeSpan>> {
    let mut open: BTreeMap<(&str, &str, &str), &HistoryEvent> = BTreeMap::new();
    let mut last_heard: HashMap<&str, u64> = HashMap::new();
    let mut waits: HashMap<&str, Vec<TimeSpan>> = HashMap::new();
    let mut add = |asked: &'h HistoryEvent, end: u64| {
        let mine = pauses.iter().filter(|pause| pause.proc == asked.proc).map(|pause| (pause.from, pause.to));
        let ran = gaps((asked.t, end), &union(mine.collect(), 0));
        waits.entry(&*asked.lock).or_default().extend(ran);
    };
    for event in history.events() {
        last_heard.insert(&event.proc, event.t);
        let (Operation::Acquire, Some(attempt)) = (event.op, event.attempt.as_deref()) else { continue };
        let key = (&*event.lock, &*event.proc, attempt);
        if event.phase == OperationPhase::Invoke {
            if counts(event) {
                open.insert(key, event);
            }
        } else if let Some(asked) = open.remove(&key) {
            add(asked, event.t);
        }
    }
    for asked in open.into_values() {
        add(asked, until.min(last_heard[&*asked.proc]));
    }
    waits
}

/// Sorted and joined, also over holes of at most `hole`.
fn union(mut spans: Vec<TimeSpan>, hole: u64) -> Vec<TimeSpan> {
    spans.sort_unstable();
    let mut joined: Vec<TimeSpan> = Vec::new();
    for span in spans.into_iter().filter(|span| span.0 < span.1) {
        match joined.last_mut() {
            Some(last) if span.0 <= last.1.saturating_add(hole) => last.1 = last.1.max(span.1),
            _ => joined.push(span),
        }
    }
    joined
}

/// The parts of `span` that `taken`, which is sorted and joined, leaves free.
fn gaps(span: TimeSpan, taken: &[TimeSpan]) -> Vec<TimeSpan> {
    let (mut at, mut free) = (span.0, Vec::new());
    for (from, to) in taken.iter().filter(|taken| taken.0 < span.1 && taken.1 > span.0) {
        if *from > at {
            free.push((at, *from));
        }
        at = at.max(*to);
    }
    if at < span.1 {
        free.push((at, span.1));
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::HistoryEvent;
    use lockkeeper_core::{Attempt, BootInstant, Fence};

    const SECOND: u64 = 1_000_000_000;

    fn event(at: u64, proc: &str, event: HistoryEvent, attempt: u8) -> HistoryEvent {
        let event = event.attempt(&Attempt::from_bytes([attempt; 16]));
        HistoryEvent { t: at * SECOND, proc: proc.into(), ..event }
    }

    /// `a` holds from second 1 to 2; `b` waits from second 1 until it is granted the lock.
    fn handed_over_at(granted: u64) -> History {
        let fence = |n| Fence::new(n).expect("a fence");
        let grant = |n, until| {
            let deadline = BootInstant::from_nanos(until * SECOND);
            HistoryEvent::ok(Operation::Acquire, "x").fence(fence(n)).deadline(deadline)
        };
        History::new([
            event(0, "a", HistoryEvent::invoke(Operation::Acquire, "x"), 1),
            event(1, "a", grant(1, 20), 1),
            event(1, "b", HistoryEvent::invoke(Operation::Acquire, "x"), 2),
            event(2, "a", HistoryEvent::invoke(Operation::Release, "x"), 1),
            event(granted, "b", grant(2, 40), 2),
        ])
    }

    #[test]
    fn a_free_lock_that_a_waiter_gets_too_late_is_found() {
        let check = |granted, from: u64| {
            let span = (from * SECOND, 30 * SECOND);
            liveness(&handed_over_at(granted), &[], span, Duration::from_secs(4), |_| true).len()
        };
        assert_eq!(check(9, 0), 1, "seven seconds");
        assert_eq!(check(5, 0), 0, "three seconds");
        assert_eq!(check(9, 6), 0, "three of them after the store was well");
    }

    #[test]
    fn a_paused_waiter_and_a_request_that_does_not_wait_do_not_count() {
        let pause = Pause { proc: "b".into(), from: 3 * SECOND, to: 8 * SECOND };
        let check = |pauses: &[Pause], waits| {
            let span = (0, 30 * SECOND);
            liveness(&handed_over_at(9), pauses, span, Duration::from_secs(4), |_| waits).len()
        };
        assert_eq!((check(&[pause], true), check(&[], true), check(&[], false)), (0, 1, 0));
    }
}
