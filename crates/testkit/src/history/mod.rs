//! Histories: what clients saw, written down by many processes, and judged afterwards.
//!
//! All processes of a machine share one clock, so the order of events is known, and each rule is checked in
//! O(n log n) by a plain function from a history to the violations in it.
//!
//! ```
//! use lockkeeper_testkit::history::{self, Demand, HistoryEvent, History, Operation, HistoryRecorder};
//! # use lockkeeper_core::{Attempt, Fence, BootInstant};
//! # let dir = lockkeeper_testkit::servers::TempDir::new("doc");
//! # let path = dir.join("run.jsonl");
//! # let attempt = Attempt::from_bytes([1; 16]);
//! # let (fence, deadline) = (Fence::new(7).unwrap(), BootInstant::NEVER);
//! let recorder = HistoryRecorder::new(&path, "worker-1").unwrap();
//! recorder.record(HistoryEvent::invoke(Operation::Acquire, "orders/42").attempt(&attempt));
//! recorder.record(HistoryEvent::ok(Operation::Acquire, "orders/42").attempt(&attempt).fence(fence).deadline(deadline));
//!
//! let history = History::read(&path).unwrap();
//! let violations = history::laws(&history);
//! let demand = Demand { operations: 1, faults: 0, contended: 0 };
//! history::verdict(&history, demand, 0, violations).assert_green();
//! ```

mod event;
mod exclusion;
mod fences;
mod holds;
mod linearizability;
mod liveness;
mod owners;
mod recorder;
mod signals;
mod verdict;
mod violation;
mod writes;

pub use event::{HistoryEvent, HoldKind, Operation, OperationPhase};
pub use exclusion::exclusion;
pub use fences::fences;
pub use linearizability::{WINDOW, linearizability};
pub use liveness::liveness;
pub use owners::owners;
pub use recorder::{History, HistoryRecorder};
pub use signals::{Pause, no_signals, signals};
pub use verdict::{Demand, HistoryVerdict, contended, residue, verdict};
pub use violation::{Rule, Violation};
pub use writes::{resource, stale_writes};

/// The rules that hold for every history, whatever the run was about: [`exclusion`], [`fences`] and [`owners`].
pub fn laws(history: &History) -> Vec<Violation> {
    [exclusion(history), fences(history), owners(history)].concat()
}
