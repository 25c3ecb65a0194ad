//! Writes `docs/RELIABILITY.md` from the reports of a full run. No part of the page is written by hand.

use std::collections::BTreeMap;
use std::fmt::Write;

use lockkeeper_core::Guarantee;
use lockkeeper_core::faults::{Deployment, Exclusion, Expectation, FaultCell, FaultKind, WaitBound};

use super::{CellReport, CellVerdict};

/// The marks of the tables, and their meaning.
pub const CELL_MARKS: [(&str, &str); 6] = [
    ("✔", "the store kept everything that it declares"),
    (
        "⚠",
        "the store is declared to let two holders in under this fault, and was seen to do so; the fenced resource took no stale write",
    ),
    ("?", "the store is declared to let two holders in under this fault, and no run showed it"),
    ("✘", "the store did not keep what it declares, or the run proves nothing: see the list"),
    ("·", "not run here: see the list"),
    ("–", "the fault cannot happen to this store"),
];

type Reports<'a> = BTreeMap<(Deployment, FaultKind), &'a CellReport>;

/// The page. Equal reports give an equal page.
pub fn reliability_page(reports: &[CellReport]) -> String {
    let by_cell: Reports<'_> =
        reports.iter().map(|report| ((report.deployment, report.fault), report)).collect();
    let mut page = String::from(INTRO);
    for (mark, meaning) in CELL_MARKS {
        _ = writeln!(page, "- {mark} {meaning}.");
    }
    page.push_str("\n## The matrix\n");
    let mains: Vec<Deployment> =
        Deployment::ALL.into_iter().filter(|deployment| deployment.main_column().is_none()).collect();
    write_table(&mut page, &mains, &by_cell);
    page.push_str(
        "\n## Other deployments of the same stores\nAn empty cell is the same as that of the main column.\n",
    );
    let others: Vec<Deployment> =
        Deployment::ALL.into_iter().filter(|deployment| deployment.main_column().is_some()).collect();
    write_table(&mut page, &others, &by_cell);
    page.push_str("\n## What is declared, and what was seen\n");
    write_list(&mut page, reports);
    page.push_str("\n---\n[All pages](README.md) · [Glossary](GLOSSARY.md)\n");
    page
}

const INTRO: &str = "# Reliability

Real client processes contend for locks in a real store while a fault is injected; their histories are then checked: exclusion, fences, the fenced
resource (beside a twin that checks no fence), the wait of the next waiter, losses that are reported in time, releases by owners only, and residue.
The program `torture` of the test kit ran the cells, judged them by the table in `crates/core/src/faults`, and wrote this page. The
[profiles](GLOSSARY.md) of the stores come from the same table.

```text
cargo run -p lockkeeper-testkit --bin torture -- --full --write-page
```

";

fn write_table(page: &mut String, columns: &[Deployment], reports: &Reports<'_>) {
    let names: Vec<&str> = columns.iter().map(|column| column.as_str()).collect();
    _ = writeln!(page, "\n| fault | {} |", names.join(" | "));
    _ = writeln!(page, "|---{}|", "|---".repeat(columns.len()));
    for fault in FaultKind::ALL {
        let marks: Vec<&str> = columns.iter().map(|column| mark(*column, fault, reports)).collect();
        _ = writeln!(page, "| {}. {} | {} |", fault.number(), fault.text(), marks.join(" | "));
    }
}

fn mark(column: Deployment, fault: FaultKind, reports: &Reports<'_>) -> &'static str {
    let cell = column.cell(fault);
    if cell.declared().is_none() {
        return "–";
    }
    // The column of the etcd that Debian has stands for both where they are the same.
    let own = reports.get(&(column, fault));
    let old = reports.get(&(Deployment::EtcdOld, fault));
    let old = old.filter(|_| column == Deployment::Etcd && Deployment::EtcdOld.cell(fault) == cell);
    match own.or(old).map(|report| &report.verdict) {
        Some(CellVerdict::Kept) => "✔",
        Some(CellVerdict::SeenToBreak) => "⚠",
        Some(CellVerdict::NotSeenToBreak) => "?",
        Some(CellVerdict::Violated(_) | CellVerdict::Invalid(_)) => "✘",
        Some(CellVerdict::NotRun(_)) => "·",
        None if column.main_column().is_some_and(|main| main.cell(fault) == cell) => " ",
        None => "·",
    }
}

/// One line for each cell of the reports: the declaration, and what was seen.
fn write_list(page: &mut String, reports: &[CellReport]) {
    for fault in FaultKind::ALL {
        _ = writeln!(page, "\n### {}. {}", fault.number(), sentence(fault.text()));
        for (deployment, why) in absences(fault) {
            _ = writeln!(page, "- {deployment}: – {why}.");
        }
        let rows: Vec<&CellReport> = reports.iter().filter(|report| report.fault == fault).collect();
        let (left_out, ran): (Vec<&CellReport>, Vec<&CellReport>) =
            rows.into_iter().partition(|report| matches!(report.verdict, CellVerdict::NotRun(_)));
        for report in left_out {
            let CellVerdict::NotRun(why) = &report.verdict else { continue };
            _ = writeln!(page, "- {}: · {why}.", report.deployment.as_str());
        }
        if !ran.is_empty() {
            page.push_str(
                "\n| store | declared | seen | runs | faults | grants | contended | unknown | losses | stale writes refused | taken by the twin | servers | day |\n\
                 |---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
            );
        }
        ran.into_iter().for_each(|report| write_row(page, report));
    }
}

fn write_row(page: &mut String, report: &CellReport) {
    let declared = report.deployment.cell(report.fault).declared().map(declaration).unwrap_or_default();
    let totals = &report.totals;
    let seen = match &report.verdict {
        CellVerdict::Kept => "✔".to_owned(),
        CellVerdict::SeenToBreak => format!("⚠ {} times two holders", report.overlaps),
        CellVerdict::NotSeenToBreak => "? no two holders".to_owned(),
        CellVerdict::Violated(why) | CellVerdict::Invalid(why) => format!("✘ {}", first_line(why)),
        CellVerdict::NotRun(_) => String::new(),
    };
    _ = writeln!(
        page,
        "| {} | {declared} | {seen} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        report.deployment.as_str(),
        report.runs,
        report.fired,
        totals.grants,
        totals.contended,
        totals.unknown,
        totals.losses,
        totals.refused,
        totals.twin_took,
        report.version,
        day(report.at)
    );
}

fn first_line(why: &[String]) -> String {
    why.first().and_then(|why| why.lines().next()).unwrap_or_default().replace('|', "/")
}

/// The columns to which a fault cannot happen, joined if the reason is the same.
fn absences(fault: FaultKind) -> Vec<(String, &'static str)> {
    let mut found: Vec<(String, &'static str)> = Vec::new();
    for deployment in Deployment::ALL {
        let FaultCell::NotApplicable(why) = deployment.cell(fault) else { continue };
        match found.iter_mut().find(|(_, other)| *other == why) {
            Some((names, _)) => _ = write!(names, ", {}", deployment.as_str()),
            None => found.push((deployment.as_str().to_owned(), why)),
        }
    }
    found
}

fn declaration(expected: Expectation) -> String {
    let exclusion = match expected.exclusion {
        Exclusion::Kept => "one holder",
        Exclusion::WhileRatesAgree => "one holder while clock rates agree",
        Exclusion::CanBreak => "two holders are possible",
    };
    let fence = match expected.fence {
        Guarantee::Kept => "fence grows",
        Guarantee::Likely => "fence likely grows",
        Guarantee::No => "no fence",
    };
    let wait = match expected.wait {
        WaitBound::Wake => "next waiter within `wake`",
        WaitBound::Lease => "within a lease and `wake`",
        WaitBound::TwoLeases => "within two leases and `wake`",
    };
    format!("{exclusion}; {fence}; {wait}")
}

fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// The day of a time of the Unix clock, as `2026-11-19` (Howard Hinnant, *chrono-compatible low-level date algorithms*).
fn day(seconds: u64) -> String {
    let z = (seconds / 86_400) as i64 + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (d, m) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let y = yoe + era * 400 + i64::from(m <= 2);
    format!("{y:04}-{m:02}-{d:02}")
}

#[cfg(test)]
mod tests {
    use super::day;

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(day(0), "1970-01-01");
        assert_eq!(day(951_782_400), "2000-02-29");
        assert_eq!(day(1_795_132_800), "2026-11-20");
    }
}
