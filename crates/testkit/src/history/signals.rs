//! C6: a loss is reported before the deadline, and only then.

use std::collections::HashMap;
use std::time::Duration;

use super::holds::{HeldInterval, holds};
use super::{History, Operation, Rule, Violation};

/// A time during which a process could not run: the check expects no signal from it then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Whom.
    pub proc: String,
    /// From when, in nanoseconds of the boot-time clock.
    pub from: u64,
    /// Until when.
    pub to: u64,
}

/// C6: the library reports a lease that ran out to its holder by the deadline; `slack` is the time that the machine may add.
///
/// A holder that was paused over its deadline gets the report right after the pause. A holder without any later event was
/// killed, and needs no report.
pub fn signals(history: &History, pauses: &[Pause], slack: Duration) -> Vec<Violation> {
    let slack = u64::try_from(slack.as_nanos()).unwrap_or(u64::MAX);
    let mut last_heard: HashMap<&str, u64> = HashMap::new();
    for event in history.events() {
        last_heard.insert(&event.proc, event.t);
    }
    let locks = holds(history);
    let ran_out = locks.values().flatten().filter(|hold| ran_out(hold));
    let late = ran_out.filter_map(|hold| {
        let due = due(hold, pauses).saturating_add(slack);
        let told = hold.signal.map(|event| event.t);
        let heard = last_heard[&*hold.asked.proc];
        let text = match told {
            Some(told) if told > due => format!("told {:.3} ms too late", (told - due) as f64 / 1e6),
            None if heard > due => "never told".to_owned(),
            _ => return None,
        };
        let text = format!("the holder of {:?} lost it at its deadline and was {text}", hold.asked.lock);
        Some(Violation::new(Rule::Signal, text, [hold.granted, hold.signal]))
    });
    late.collect()
}

/// In a run without a cause, no guard reports a loss.
pub fn no_signals(history: &History) -> Vec<Violation> {
    let signals = history.events().iter().filter(|event| event.op == Operation::Signal);
    signals.map(|event| Violation::new(Rule::Signal, "a loss without a reason", [Some(event)])).collect()
}

/// Whether it reached its deadline without being released.
fn ran_out(hold: &HeldInterval<'_>) -> bool {
    let released = hold.release.is_some_and(|event| event.t <= hold.deadline);
    hold.granted.is_some() && hold.deadline < u64::MAX && !released
}

fn due(hold: &HeldInterval<'_>, pauses: &[Pause]) -> u64 {
    let mine = pauses.iter().filter(|pause| pause.proc == hold.asked.proc);
    let over = mine.filter(|pause| (pause.from..=pause.to).contains(&hold.deadline));
    over.map(|pause| pause.to).fold(hold.deadline, u64::max)
}
