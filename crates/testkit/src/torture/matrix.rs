//! Runs many cells, each in a process of its own, several at a time.

use std::io;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use lockkeeper_core::IgnorePoison;
use lockkeeper_core::faults::{Deployment, FaultKind};

use super::{CellReport, CellVerdict, TrafficTotals};
use crate::servers::{SERVERS_DIR, TempDir};

/// Which cells are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// A few cells of each kind.
    Quick,
    /// Every cell that is not the same as one of another column.
    Full,
}

/// How the cells are run.
#[derive(Clone, Debug)]
pub struct MatrixOptions {
    /// The seed of the first run of each cell.
    pub seed: u64,
    /// For how long faults strike.
    pub span: Duration,
    /// How many cells run at a time.
    pub at_a_time: usize,
}

/// The cells of `--quick`: each injection once, and each store at least once.
const QUICK: [(Deployment, FaultKind); 9] = {
    use Deployment::*;
    use FaultKind::*;
    [
        (Sqlite, HolderKilled),
        (Sqlite, HolderStopped),
        (RedisAlways, HolderCutOff),
        (RedisVolatile, StoreKilled),
        (Postgres, StoreKilled),
        (Postgres, ReplyLost),
        (EtcdOld, OneWayCut),
        (ZooKeeper, HolderStopped),
        (Redlock, ReplyLost),
    ]
};

impl Selection {
    /// The cells, in the order in which they begin.
    pub fn cells(self) -> Vec<(Deployment, FaultKind)> {
        match self {
            Selection::Quick => QUICK.to_vec(),
            Selection::Full => {
                let all = FaultKind::ALL
                    .into_iter()
                    .flat_map(|fault| Deployment::ALL.into_iter().map(move |deployment| (deployment, fault)));
                all.filter(|(deployment, fault)| is_of_its_own(*deployment, *fault)).collect()
            }
        }
    }
}

/// Whether the cell is not merely a repetition of the main column of its store.
fn is_of_its_own(deployment: Deployment, fault: FaultKind) -> bool {
    let cell = deployment.cell(fault);
    // The etcd of Debian is an old one: its column stands for both where they are the same.
    let twin = match deployment {
        Deployment::Etcd => Some(Deployment::EtcdOld),
        Deployment::EtcdOld => None,
        _ => deployment.main_column(),
    };
    cell.declared().is_some() && twin.is_none_or(|twin| twin.cell(fault) != cell)
}

/// Runs these cells, and returns their reports in the same order. `program` is this program: it is called with `--cell COLUMN:ROW`, and
/// prints the report as JSON. `done` is called after each.
///
/// # Errors
/// If a process cannot be started.
pub fn run_matrix(
    cells: &[(Deployment, FaultKind)],
    options: &MatrixOptions,
    program: &std::path::Path,
    done: impl Fn(&CellReport) + Sync,
) -> io::Result<Vec<CellReport>> {
    let next = Mutex::new(0..cells.len());
    let reports = Mutex::new(Vec::new());
    let work = || -> io::Result<()> {
        loop {
            let Some(nth) = next.lock().ignore_poison().next() else { return Ok(()) };
            let report = run_apart(cells[nth], options, program)?;
            done(&report);
            reports.lock().ignore_poison().push((nth, report));
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.at_a_time.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    let mut reports = std::mem::take(&mut *reports.lock().ignore_poison());
    reports.sort_by_key(|(nth, _)| *nth);
    Ok(reports.into_iter().map(|(_, report)| report).collect())
}

fn run_apart(
    (deployment, fault): (Deployment, FaultKind),
    options: &MatrixOptions,
    program: &std::path::Path,
) -> io::Result<CellReport> {
    let disk = TempDir::new("servers");
    let output = Command::new(program)
        .args(["--cell", &format!("{}:{}", deployment.as_str(), fault.number()), "--json"])
        .args(["--seed", &options.seed.to_string(), "--seconds", &options.span.as_secs().to_string()])
        .env(SERVERS_DIR, disk.path())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .output()?;
    super::disk::unmount_rest(disk.path());
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    Ok(report.unwrap_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = said.lines().collect();
        let why = lines[lines.len().saturating_sub(6)..].join("; ");
        CellReport {
            deployment,
            fault,
            seed: options.seed,
            runs: 1,
            version: String::new(),
            at: 0,
            fired: 0,
            totals: TrafficTotals::default(),
            overlaps: 0,
            verdict: CellVerdict::Invalid(vec![format!("the cell ended with {}: {why}", output.status)]),
        }
    }))
}
