//! A few cells of the matrix of faults.
#![cfg(feature = "stores")]

use std::process::Command;

use lockkeeper_core::faults::Deployment;
use lockkeeper_testkit::torture::{CellReport, CellVerdict, Selection};

/// Real servers and processes: a cell in which no fault fired, or nothing contended, is as bad as a broken promise.
#[test]
fn the_quick_cells_show_what_they_have_to_show() {
    // Three minutes on two cores.
    if lockkeeper_testkit::servers::only_with_full().is_err() {
        return;
    }
    let output =
        Command::new(env!("CARGO_BIN_EXE_torture")).args(["--quick", "--json", "--jobs", "4"]).output();
    let output = output.expect("torture runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let reports: Vec<CellReport> =
        text.lines().map(|line| serde_json::from_str(line).expect("a report")).collect();
    let bad: Vec<&CellReport> = reports.iter().filter(|report| !report.is_good()).collect();
    assert!(bad.is_empty(), "{bad:#?}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(reports.len(), Selection::Quick.cells().len());
    // A server may be left out; the embedded store is always there.
    let ran = |deployment| {
        let mine = reports.iter().filter(|report| report.deployment == deployment);
        mine.filter(|report| !matches!(report.verdict, CellVerdict::NotRun(_))).count()
    };
    assert_eq!(ran(Deployment::Sqlite), 2);
}

#[test]
fn a_wrong_option_is_refused() {
    let run = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_torture")).args(args).output().expect("torture runs")
    };
    for wrong in [&["--quik"][..], &["--store", "mysql"], &["--fault", "23"], &[]] {
        let output = run(wrong);
        assert!(!output.status.success() && output.stdout.is_empty(), "{wrong:?}: {output:?}");
    }
    let listed = run(&["--list", "--store", "postgres"]);
    let text = String::from_utf8(listed.stdout).expect("text");
    assert!(
        text.contains(
            "postgres:10  the wall clock of the server is set forward by an hour  [exclusion CanBreak"
        ),
        "{text}"
    );
}
