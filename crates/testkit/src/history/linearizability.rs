//! A second opinion on exclusion and fences: a search for one order of all grants and releases that explains what the clients saw.
//!
//! The search is that of Wing and Gong with the memory of Lowe ("Testing for linearizability", 2017): it goes through the orders that respect
//! real time, and remembers which sets of done operations, in which state of the lock, it has seen. It shares no code with
//! [`exclusion`](super::exclusion) and [`fences`](super::fences), and is far slower, so it looks at windows between two moments at which
//! no operation is under way.

use std::collections::{BTreeSet, HashSet};

use lockkeeper_core::Mode;

use super::holds::{HeldInterval, holds};
use super::{History, Rule, Violation};

/// The most operations of a window. Larger windows are left to the other checkers.
pub const WINDOW: usize = 200;

/// Grants and releases of exclusive locks are linearizable: there is an order of them, each at a moment between its request and its answer, in
/// which the lock has one holder at a time and each grant has a higher fence than the one before.
///
/// A hold may also end without a release, once its holder believes in it no more: at its deadline, or at the report of its loss. A request
/// without a good answer was never believed to be held. Locks with shared holders, permits or re-entry are left out.
pub fn linearizability(history: &History) -> Vec<Violation> {
    let locks = holds(history);
    let exclusive = |holds: &&Vec<HeldInterval<'_>>| {
        holds.iter().all(|hold| hold.mode() == Mode::Exclusive && hold.owner().is_none())
    };
    locks.values().filter(exclusive).filter_map(|holds| explain(holds)).collect()
}

/// A grant or a release, by the number of its hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockStep {
    Grant(usize),
    Release(usize),
}

/// An operation, from its request to its answer.
#[derive(Clone, Copy, Debug)]
struct TimedStep {
    step: LockStep,
    from: u64,
    to: u64,
}

/// The lock between two operations: the number of the hold, and the fence of the last grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct OrderState {
    holder: Option<usize>,
    fence: u64,
}

/// Looks for an order, window by window. The first window without one is the violation.
fn explain(holds: &[HeldInterval<'_>]) -> Option<Violation> {
    let mut states = BTreeSet::from([OrderState::default()]);
    for window in windows(timed_steps(holds)) {
        let after = match window.len() {
            0..=WINDOW => {
                states.iter().flat_map(|state| OrderSearch::new(holds, &window).run(*state)).collect()
            }
            _ => skipped(holds, &window),
        };
        if BTreeSet::is_empty(&after) {
            let (first, last) = (window.first()?, window.last()?);
            let text = format!(
                "no order of the {} operations on {:?} between {} and {} ns explains what the clients saw",
                window.len(),
                holds[0].asked.lock,
                first.from,
                last.to
            );
            let grants = window.iter().filter_map(|one| match one.step {
                LockStep::Grant(n) => Some(holds[n].granted),
                LockStep::Release(_) => None,
            });
            return Some(Violation::new(Rule::Linearizability, text, grants));
        }
        states = after;
    }
    None
}

fn timed_steps(holds: &[HeldInterval<'_>]) -> Vec<TimedStep> {
    let mut steps = Vec::new();
    for (n, hold) in holds.iter().enumerate() {
        let Some(granted) = hold.granted else { continue };
        steps.push(TimedStep { step: LockStep::Grant(n), from: hold.asked.t, to: granted.t });
        if let (Some(release), Some(released)) = (hold.release, hold.released) {
            steps.push(TimedStep { step: LockStep::Release(n), from: release.t, to: released.t });
        }
    }
    steps.sort_by_key(|one| one.from);
    steps
}

/// Cuts where no operation is under way.
fn windows(steps: Vec<TimedStep>) -> Vec<Vec<TimedStep>> {
    let mut windows: Vec<Vec<TimedStep>> = Vec::new();
    let mut until = 0;
    for one in steps {
        match windows.last_mut() {
            Some(window) if one.from <= until => window.push(one),
            _ => windows.push(vec![one]),
        }
        until = until.max(one.to);
    }
    windows
}

/// The states in which a window that is not searched may end: any of its grants may be the last.
fn skipped(holds: &[HeldInterval<'_>], window: &[TimedStep]) -> BTreeSet<OrderState> {
    let fence = |n: usize| holds[n].fence().unwrap_or(0);
    let highest = window.iter().filter_map(|one| match one.step {
        LockStep::Grant(n) => Some(n),
        LockStep::Release(_) => None,
    });
    let last = highest.max_by_key(|n| fence(*n));
    let held = last.map(|n| OrderState { holder: Some(n), fence: fence(n) });
    held.into_iter().flat_map(|held| [held, OrderState { holder: None, ..held }]).collect()
}

/// The search through one window.
struct OrderSearch<'a> {
    holds: &'a [HeldInterval<'a>],
    steps: &'a [TimedStep],
    seen: HashSet<(Vec<u64>, OrderState)>,
    ends: BTreeSet<OrderState>,
}

impl<'a> OrderSearch<'a> {
    fn new(holds: &'a [HeldInterval<'a>], steps: &'a [TimedStep]) -> Self {
        OrderSearch { holds, steps, seen: HashSet::new(), ends: BTreeSet::new() }
    }

    /// Every state in which an order that explains the window ends.
    fn run(mut self, start: OrderState) -> BTreeSet<OrderState> {
        let mut open = vec![(vec![0; self.steps.len().div_ceil(64)], start)];
        while let Some((done, state)) = open.pop() {
            if !self.seen.insert((done.clone(), state)) {
                continue;
            }
            let left = (0..self.steps.len()).filter(|n| !is_done(&done, *n)).collect::<Vec<usize>>();
            // The next operation began before any of the others had its answer.
            let Some(first_answer) = left.iter().map(|n| self.steps[*n].to).min() else {
                self.ends.insert(state);
                continue;
            };
            for n in left.into_iter().filter(|n| self.steps[*n].from <= first_answer) {
                if let Some(after) = self.apply(state, self.steps[n]) {
                    let mut done = done.clone();
                    done[n / 64] |= 1 << (n % 64);
                    if self.may_end(&done, after) {
                        open.push((done, after));
                    }
                }
            }
        }
        self.ends
    }

    /// The state after the operation, if it may be the next.
    fn apply(&self, state: OrderState, next: TimedStep) -> Option<OrderState> {
        match next.step {
            LockStep::Grant(n) => {
                let fence = self.holds[n].fence()?;
                let free = state.holder.is_none_or(|holder| self.holds[holder].until() <= next.to);
                (free && fence > state.fence).then_some(OrderState { holder: Some(n), fence })
            }
            // A hold that has ended already was released too late, and the store did not say so.
            LockStep::Release(n) => (state.holder == Some(n)).then_some(OrderState { holder: None, ..state }),
        }
    }

    /// No order goes on from here if a grant that is left has a lower fence.
    fn may_end(&self, done: &[u64], state: OrderState) -> bool {
        let left = self.steps.iter().enumerate().filter(|(n, _)| !is_done(done, *n));
        left.into_iter().all(|(_, one)| match one.step {
            LockStep::Grant(n) => self.holds[n].fence() > Some(state.fence),
            LockStep::Release(_) => true,
        })
    }
}

fn is_done(done: &[u64], n: usize) -> bool {
    done[n / 64] & (1 << (n % 64)) != 0
}
