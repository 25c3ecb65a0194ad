//! Runs cells of the matrix of faults, and writes `docs/RELIABILITY.md` from them.
//!
//! ```text
//! torture --list                                  the cells, and what is declared for each
//! torture --quick | --full                        a few cells, or all of their own
//! torture --store COLUMN --fault N                those of one column, of one row, or one cell
//!         --seed N --seconds S --jobs J --json    the schedule, the time of each cell, how many at a time, reports as JSON
//!         --write-page                            docs/RELIABILITY.md and docs/reliability.json, with these reports
//! ```
//! The exit code is 1 if a cell does not show what it has to show.

use std::path::Path;
use std::time::Duration;

use lockkeeper_core::faults::{Deployment, FaultCell, FaultKind};
use lockkeeper_testkit::torture::{
    CellPlan, CellReport, CellVerdict, ClientProgram, MatrixOptions, Selection, reliability_page, run_cell,
    run_matrix, run_traffic_client,
};

type TortureFailure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Default)]
struct TortureArgs {
    words: Vec<String>,
}

impl TortureArgs {
    fn flag(&self, name: &str) -> bool {
        self.words.iter().any(|word| word == name)
    }

    fn value(&self, name: &str) -> Result<Option<&str>, TortureFailure> {
        let Some(at) = self.words.iter().position(|word| word == name) else { return Ok(None) };
        let value = self.words.get(at + 1).ok_or_else(|| format!("{name} needs a value"))?;
        Ok(Some(value))
    }

    fn number(&self, name: &str, default: u64) -> Result<u64, TortureFailure> {
        Ok(self.value(name)?.map_or(Ok(default), str::parse)?)
    }

    fn check(&self) -> Result<(), TortureFailure> {
        let flags = ["--list", "--quick", "--full", "--json", "--write-page", "--client"];
        let values = ["--store", "--fault", "--seed", "--seconds", "--jobs", "--cell"];
        let mut words = self.words.iter();
        while let Some(word) = words.next() {
            if values.contains(&&**word) {
                words.next();
            } else if !flags.contains(&&**word) {
                return Err(format!("{word} is no option of torture: see the top of its source").into());
            }
        }
        Ok(())
    }
}

fn column(name: &str) -> Result<Deployment, TortureFailure> {
    let found = Deployment::ALL.into_iter().find(|deployment| deployment.as_str() == name);
    found.ok_or_else(|| format!("{name} is no column: --list shows them").into())
}

fn row(number: &str) -> Result<FaultKind, TortureFailure> {
    FaultKind::of_number(number.parse()?)
        .ok_or_else(|| format!("{number} is no row: --list shows them").into())
}

fn selected(args: &TortureArgs) -> Result<Vec<(Deployment, FaultKind)>, TortureFailure> {
    let store = args.value("--store")?.map(column).transpose()?;
    let fault = args.value("--fault")?.map(row).transpose()?;
    if let (Some(store), Some(fault)) = (store, fault) {
        return Ok(vec![(store, fault)]);
    }
    let all = if args.flag("--quick") { Selection::Quick } else { Selection::Full };
    if !args.flag("--quick")
        && !args.flag("--full")
        && !args.flag("--list")
        && store.is_none()
        && fault.is_none()
    {
        return Err("say --quick, --full, --store COLUMN or --fault N".into());
    }
    let mut cells = all.cells();
    cells.retain(|(one, row)| {
        store.is_none_or(|store| store == *one) && fault.is_none_or(|fault| fault == *row)
    });
    Ok(cells)
}

fn list(cells: &[(Deployment, FaultKind)]) {
    for (deployment, fault) in cells {
        let declared = match deployment.cell(*fault) {
            FaultCell::Declared(expected) => {
                format!(
                    "exclusion {:?}, fence {:?}, wait {:?}",
                    expected.exclusion, expected.fence, expected.wait
                )
            }
            FaultCell::NotApplicable(why) => why.to_owned(),
        };
        println!("{}:{}  {}  [{declared}]", deployment.as_str(), fault.number(), fault.text());
    }
}

fn print(report: &CellReport, json: bool) {
    if json {
        println!("{}", serde_json::to_string(report).expect("a report can be written as JSON"));
        return;
    }
    let totals = &report.totals;
    println!(
        "{}:{}  {:?}  [{} faults, {} grants, {} contended, {} unknown, {} losses, {} overlaps, {} stale refused, {} taken by the twin; seed {}, {} runs]",
        report.deployment.as_str(),
        report.fault.number(),
        report.verdict,
        report.fired,
        totals.grants,
        totals.contended,
        totals.unknown,
        totals.losses,
        report.overlaps,
        totals.refused,
        totals.twin_took,
        report.seed,
        report.runs
    );
}

fn main() -> Result<(), TortureFailure> {
    let args = TortureArgs { words: std::env::args().skip(1).collect() };
    args.check()?;
    if args.flag("--client") {
        return run_traffic_client();
    }
    let program = std::env::current_exe()?;
    let (seed, json) = (args.number("--seed", 1)?, args.flag("--json"));
    let seconds = args.number("--seconds", if args.flag("--quick") { 8 } else { 15 })?;
    if let Some(cell) = args.value("--cell")? {
        let (store, fault) = cell.split_once(':').ok_or("--cell is COLUMN:ROW")?;
        let client = ClientProgram { program, args: vec!["--client".into()] };
        let span = Duration::from_secs(seconds);
        let plan = CellPlan { deployment: column(store)?, fault: row(fault)?, seed, span, program: client };
        print(&run_cell(&plan), json);
        return Ok(());
    }
    let cells = selected(&args)?;
    if args.flag("--list") {
        list(&cells);
        return Ok(());
    }
    let at_a_time = args.number("--jobs", 3)? as usize;
    let options = MatrixOptions { seed, span: Duration::from_secs(seconds), at_a_time };
    let reports = run_matrix(&cells, &options, &program, |report| print(report, json))?;
    if args.flag("--write-page") {
        write_page(&reports)?;
    }
    let bad = reports.iter().filter(|report| !report.is_good()).count();
    let left_out = reports.iter().filter(|report| matches!(report.verdict, CellVerdict::NotRun(_))).count();
    eprintln!("{} cells, {bad} of them bad, {left_out} not run", reports.len());
    if bad > 0 {
        std::process::exit(1);
    }
    Ok(())
}

fn write_page(reports: &[CellReport]) -> Result<(), TortureFailure> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let before = std::fs::read_to_string(docs.join("reliability.json")).unwrap_or_else(|_| "[]".to_owned());
    let before: Vec<CellReport> = serde_json::from_str(&before)?;
    let cells = Selection::Full.cells();
    // The cells that did not run now keep their last report.
    let newest = |cell: &(Deployment, FaultKind)| {
        let is = |report: &&CellReport| (report.deployment, report.fault) == *cell;
        reports.iter().find(is).or_else(|| before.iter().find(is)).cloned()
    };
    let all: Vec<CellReport> = cells.iter().filter_map(newest).collect();
    let lines: Vec<String> = all.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    std::fs::write(docs.join("reliability.json"), format!("[\n{}\n]\n", lines.join(",\n")))?;
    std::fs::write(docs.join("RELIABILITY.md"), reliability_page(&all))?;
    Ok(())
}
