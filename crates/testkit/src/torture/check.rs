//! Judges a run: reads the history and the resources of its clients, and applies all checks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use lockkeeper_core::Outcome;
use serde::{Deserialize, Serialize};

use super::traffic::{history_path, pauses_path, resource_paths, waits};
use super::traffic_client::NoticedPause;
use crate::history::{
    self, History, HistoryEvent, Operation, OperationPhase, Pause, Violation, contended, stale_writes,
};
use crate::resource::{CheckedFile, UncheckedFile};

/// A report may be late by this much, besides the pauses that a process noticed.
pub(super) const SLACK: Duration = Duration::from_millis(1500);

/// The end of a process that was killed: its holds ended with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessEnd {
    /// The process.
    pub proc: String,
    /// When, in nanoseconds of the boot-time clock.
    pub at: u64,
}

/// The circumstances of a run that its history does not show.
#[derive(Clone, Debug, Default)]
pub struct RunConditions {
    /// The processes that were killed.
    pub killed: Vec<ProcessEnd>,
    /// From when the store was well, in nanoseconds of the boot-time clock.
    pub healed: u64,
    /// When the clients were asked to stop.
    pub until: u64,
    /// How long a free lock may stay without a holder while clients wait.
    pub bound: Duration,
    /// The rest in the store: the names of locks, and their states.
    pub left: Vec<(String, String)>,
    /// No guard may report a loss.
    pub no_losses: bool,
}

/// How much a run tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficTotals {
    /// Operations that came to an end.
    pub operations: u64,
    /// Grants.
    pub grants: u64,
    /// Requests that found the lock taken.
    pub contended: u64,
    /// Requests and releases whose outcome is unknown.
    pub unknown: u64,
    /// Losses that guards reported.
    pub losses: u64,
    /// Writes that the fenced resources took.
    pub writes: u64,
    /// Stale writes that the fenced resources refused.
    pub refused: u64,
    /// Stale writes that the unfenced twins took.
    pub twin_took: u64,
}

impl TrafficTotals {
    /// Adds those of another run.
    pub fn add(&mut self, other: &TrafficTotals) {
        let pairs = [
            (&mut self.operations, other.operations),
            (&mut self.grants, other.grants),
            (&mut self.contended, other.contended),
            (&mut self.unknown, other.unknown),
            (&mut self.losses, other.losses),
            (&mut self.writes, other.writes),
            (&mut self.refused, other.refused),
            (&mut self.twin_took, other.twin_took),
        ];
        pairs.into_iter().for_each(|(sum, more)| *sum += more);
    }
}

/// The violations in a run, by promise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrafficFindings {
    /// How much was tried.
    pub totals: TrafficTotals,
    /// C1: two holders at once.
    pub exclusion: Vec<Violation>,
    /// C2 and C3: fences that went back, and stale writes that a fenced resource took.
    pub fence: Vec<Violation>,
    /// C4: a free lock that waiters did not get.
    pub waiting: Vec<Violation>,
    /// C5, C6, C7: residue, losses that were reported late, releases by another than the owner.
    pub other: Vec<Violation>,
}

/// Reads what the clients of a run left in `dir`, and checks it.
///
/// # Errors
/// If a file cannot be read or understood.
pub fn check_traffic(dir: &Path, conditions: &RunConditions) -> io::Result<TrafficFindings> {
    let pauses = read_pauses(dir)?;
    let history = with_ends(History::read(history_path(dir))?, &conditions.killed);
    let mut found = TrafficFindings { exclusion: history::exclusion(&history), ..TrafficFindings::default() };
    found.fence = history::fences(&history);
    let span = (conditions.healed, conditions.until);
    found.waiting =
        history::liveness(&history, &pauses, span, conditions.bound + SLACK, |asked| waits(&asked.lock));
    let left = conditions.left.iter().map(|(lock, what)| (&**lock, &**what));
    found.other = [
        history::owners(&history),
        history::signals(&history, &pauses, SLACK),
        history::residue(&history, left),
        if conditions.no_losses { history::no_signals(&history) } else { Vec::new() },
    ]
    .concat();
    found.totals = totals(&history);
    for lock in written(&history) {
        let [fenced, unfenced] = resource_paths(dir, lock);
        let accepted = CheckedFile::new(fenced).accepted().map_err(io::Error::other)?;
        found.fence.extend(history::resource(&history, lock, &accepted));
        found.totals.writes += accepted.len() as u64;
        let twin = UncheckedFile::new(unfenced).accepted().map_err(io::Error::other)?;
        found.totals.twin_took += stale_writes(&twin).count() as u64;
    }
    Ok(found)
}

fn read_pauses(dir: &Path) -> io::Result<Vec<Pause>> {
    let text = match fs::read_to_string(pauses_path(dir)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        text => text?,
    };
    let pauses = text.lines().map(|line| {
        let NoticedPause { proc, from, to } = serde_json::from_str(line)?;
        Ok(Pause { proc, from, to })
    });
    pauses.collect()
}

/// Adds the ends of the holds of the processes that were killed, and of their requests: a dead process believes nothing.
fn with_ends(history: History, killed: &[ProcessEnd]) -> History {
    let ends: HashMap<&str, u64> = killed.iter().map(|end| (&*end.proc, end.at)).collect();
    let mut open: BTreeMap<(&str, &str, &str), &HistoryEvent> = BTreeMap::new();
    for event in history.events().iter().filter(|event| ends.contains_key(&*event.proc)) {
        let Some(attempt) = event.attempt.as_deref() else { continue };
        let key = (&*event.proc, &*event.lock, attempt);
        match (event.op, event.phase) {
            (Operation::Acquire, OperationPhase::Ok) => _ = open.insert(key, event),
            (Operation::Signal, _) | (Operation::Release, OperationPhase::Invoke) => _ = open.remove(&key),
            _ => {}
        }
    }
    let signals = open.values().map(|grant| {
        let end = ends[&*grant.proc].max(grant.t);
        let signal = HistoryEvent::signal(&grant.lock);
        HistoryEvent { t: end, proc: grant.proc.clone(), attempt: grant.attempt.clone(), ..signal }
    });
    let signals: Vec<HistoryEvent> = signals.collect();
    if signals.is_empty() { history } else { History::new(history.events().iter().cloned().chain(signals)) }
}

fn totals(history: &History) -> TrafficTotals {
    let count = |good: &dyn Fn(&HistoryEvent) -> bool| {
        history.events().iter().filter(|event| good(event)).count() as u64
    };
    let is = |event: &HistoryEvent, op, phase| event.op == op && event.phase == phase;
    let stale = Some(Outcome::Stale.as_str());
    TrafficTotals {
        operations: count(&|event| event.phase != OperationPhase::Invoke && event.op != Operation::Signal),
        grants: count(&|event| is(event, Operation::Acquire, OperationPhase::Ok)),
        contended: contended(history) as u64,
        unknown: count(&|event| event.phase == OperationPhase::Info && event.op != Operation::Signal),
        losses: count(&|event| event.op == Operation::Signal),
        refused: count(&|event| event.op == Operation::Write && event.error.as_deref() == stale),
        ..TrafficTotals::default()
    }
}

/// The locks that protect a resource.
fn written(history: &History) -> BTreeSet<&str> {
    let writes = history.events().iter().filter(|event| event.op == Operation::Write);
    writes.map(|event| &*event.lock).collect()
}
