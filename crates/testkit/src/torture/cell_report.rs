//! The report about one cell.

use lockkeeper_core::Guarantee;
use lockkeeper_core::faults::{Deployment, Exclusion, Expectation, FaultKind};
use serde::{Deserialize, Serialize};

use super::{TrafficFindings, TrafficTotals};
use crate::history::{Rule, Violation};

/// The result of a cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CellVerdict {
    /// The store kept what it declares.
    Kept,
    /// The store is declared breakable, and was seen to break; the fenced resource took no stale write.
    SeenToBreak,
    /// The store is declared breakable, and did not break in any run.
    NotSeenToBreak,
    /// The store did not keep what it declares.
    Violated(Vec<String>),
    /// Too little happened to prove anything.
    Invalid(Vec<String>),
    /// The fault cannot be injected here; why.
    NotRun(String),
}

/// One cell of the matrix, and what was seen in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellReport {
    /// The column.
    pub deployment: Deployment,
    /// The row.
    pub fault: FaultKind,
    /// The seed of the last run.
    pub seed: u64,
    /// How many runs there were: a cell that is declared breakable is run until it breaks.
    pub runs: u32,
    /// The servers.
    pub version: String,
    /// When, in seconds of the Unix clock.
    pub at: u64,
    /// How often the fault fired.
    pub fired: u64,
    /// How much was tried.
    pub totals: TrafficTotals,
    /// How often two holders were seen at once.
    pub overlaps: u64,
    /// The result.
    pub verdict: CellVerdict,
}

/// How many violations a report shows.
const SHOWN: usize = 3;

/// Compares what was found with what is declared.
pub(super) fn judge(expected: &Expectation, found: &TrafficFindings, invalid: Vec<String>) -> CellVerdict {
    let mut broken: Vec<&Violation> = found.waiting.iter().chain(&found.other).collect();
    if expected.exclusion == Exclusion::CanBreak {
        // Of two holders at once, each releases its own hold while the other believes to hold the lock.
        broken.retain(|violation| violation.rule != Rule::Owner);
    } else {
        broken.extend(&found.exclusion);
    }
    if expected.fence == Guarantee::Kept {
        broken.extend(&found.fence);
    }
    if !broken.is_empty() {
        return CellVerdict::Violated(
            broken.iter().take(SHOWN).map(|violation| violation.to_string()).collect(),
        );
    }
    if !invalid.is_empty() {
        return CellVerdict::Invalid(invalid);
    }
    match (expected.exclusion, found.exclusion.is_empty()) {
        (Exclusion::CanBreak, true) => CellVerdict::NotSeenToBreak,
        (Exclusion::CanBreak, false) => CellVerdict::SeenToBreak,
        (Exclusion::Kept | Exclusion::WhileRatesAgree, _) => CellVerdict::Kept,
    }
}

impl CellReport {
    /// Whether the cell shows what it has to show.
    pub fn is_good(&self) -> bool {
        matches!(self.verdict, CellVerdict::Kept | CellVerdict::SeenToBreak | CellVerdict::NotRun(_))
    }
}
