//! `lockkeeper lab`: failures of locks that anyone can watch.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use lockkeeper::Outcome;
use lockkeeper_lab::{
    HtmlReport, Lab, LabError, LabOptions, LabVerdict, Need, Scenario, ScenarioOutcome, ViewMode,
};
use serde_json::{Value, json};

use crate::args::{SecretUrl, secret_url};
use crate::exit::{self, ExitFailure, OK};
use crate::output;
use crate::signals::SignalStream;
use crate::text::quoted;

/// A half of a scenario came out otherwise than its page says.
const OTHERWISE: i32 = 1;
/// The fault did not fire: the run proves nothing.
const INVALID: i32 = 2;

/// Watch locks fail, and hold: real processes, a real store, the naive way beside the safe one.
#[derive(Args, Debug)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

/// The actions of the lab.
#[derive(Debug, Subcommand)]
enum LabCommand {
    /// List the scenarios, and what each needs
    Ls(LabLsArgs),
    /// Run a scenario, or all of them
    Run(LabRunArgs),
}

/// List the scenarios, how long each takes, and whether the servers that it needs are installed.
#[derive(Args, Debug)]
struct LabLsArgs {
    /// Write JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Run a scenario: both ways beside each other, live, with the damage of each counted at the end.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
struct LabRunArgs {
    /// The name of a scenario, or `all`
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// The store, for scenarios that start no server of their own [default: a SQLite file in a temporary directory]
    #[arg(long, value_name = "URL", value_parser = secret_url())]
    store: Option<SecretUrl>,
    /// Write a report with the timelines to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write one JSON object per scenario, with all events, and nothing else
    #[arg(long)]
    json: bool,
    /// Short ttls and few processes
    #[arg(long)]
    fast: bool,
    /// Print the outcome only
    #[arg(long, short)]
    quiet: bool,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper lab run pause                      a holder that was stopped writes late
  lockkeeper lab run pause --html pause.html    the same, with a report for the browser
  lockkeeper lab run all --fast --quiet         every scenario that can run on this machine

Exit codes: 0 each way came out as the scenario says; 1 one did not; 2 the fault did not fire, so the
run proves nothing; 69 a server that the scenario needs is not installed; 74 the run failed.";

impl LabArgs {
    pub fn json(&self) -> bool {
        match &self.command {
            LabCommand::Ls(ls) => ls.json,
            LabCommand::Run(run) => run.json,
        }
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        match self.command {
            LabCommand::Ls(ls) => list(&ls).map(|()| OK),
            LabCommand::Run(run) => run.execute().await,
        }
    }
}

fn list(args: &LabLsArgs) -> Result<(), ExitFailure> {
    for scenario in lockkeeper_lab::all() {
        let needs = scenario.needs.iter().map(|need| need.name());
        let missing = scenario.missing();
        if args.json {
            let packages: Vec<&str> = missing.iter().map(|need| need.packages()).collect();
            let line = json!({
                "name": scenario.name, "title": scenario.title, "seconds": scenario.seconds.0,
                "needs": needs.collect::<Vec<_>>(), "missing_packages": packages,
            });
            output::line(&line.to_string())?;
        } else {
            let needs = match (scenario.needs, missing.as_slice()) {
                ([], _) => String::new(),
                (_, []) => format!("  (starts {})", needs.collect::<Vec<_>>().join(" and ")),
                (_, missing) => format!("  (missing: {})", Need::install(missing)),
            };
            let name = output::bold(&format!("{:<18}", scenario.name));
            output::line(&format!("{name} {:>3} s  {}{needs}", scenario.seconds.0, scenario.title))?;
        }
    }
    Ok(())
}

impl LabRunArgs {
    /// The scenarios to run. Of `all`, those whose servers are missing are left out, and named.
    fn scenarios(&self) -> Result<Vec<&'static Scenario>, ExitFailure> {
        if self.names == ["all"] {
            let (can, cannot): (Vec<_>, Vec<_>) =
                lockkeeper_lab::all().iter().partition(|scenario| scenario.missing().is_empty());
            cannot.iter().for_each(|scenario| missing(scenario).print(self.json));
            return Ok(can);
        }
        let find = |name: &String| {
            let unknown =
                || ExitFailure::new(Outcome::Invalid, format!("there is no scenario {}", quoted(name)));
            let scenario = lockkeeper_lab::find(name);
            let scenario = scenario.ok_or_else(|| unknown().next("list them: lockkeeper lab ls"))?;
            if scenario.missing().is_empty() { Ok(scenario) } else { Err(missing(scenario)) }
        };
        self.names.iter().map(find).collect()
    }

    async fn execute(self) -> Result<i32, ExitFailure> {
        let scenarios = self.scenarios()?;
        let options = self.options()?;
        if let Some(path) = &self.html {
            // A report that cannot be written is known before the run, not after it.
            let opened = std::fs::File::options().create(true).append(true).open(path);
            opened.map(drop).map_err(|e| cannot_write(path, &e))?;
        }
        let (mut report, mut codes) = (HtmlReport::default(), Vec::new());
        for scenario in scenarios {
            let code = match run(scenario, &options).await? {
                Ok(outcome) => {
                    let store = store_kind(scenario, options.store.as_deref());
                    self.print(scenario, &outcome, &store)?;
                    report.add(scenario, &outcome, &store);
                    match outcome.verdict() {
                        LabVerdict::Expected => OK,
                        LabVerdict::Otherwise => OTHERWISE,
                        LabVerdict::Invalid => INVALID,
                    }
                }
                Err(failure) => {
                    failure.print(self.json);
                    failure.code
                }
            };
            codes.push(code);
        }
        if let Some(path) = &self.html {
            write_report(path, &report.html())?;
            if !self.json {
                output::line(&format!("report: {}", quoted(&path.to_string_lossy())))?;
            }
        }
        // A run that proves nothing is worse news than a finding.
        Ok(codes.into_iter().max().unwrap_or(OK))
    }

    fn options(&self) -> Result<LabOptions, ExitFailure> {
        let store = match self.store.as_ref().or_else(|| crate::store::BEFORE.get()) {
            Some(url) => Some(url.expose()?.to_owned()),
            None => None,
        };
        if store.as_deref().is_some_and(|url| url.starts_with("memory:")) {
            let wrong = ExitFailure::new(Outcome::Invalid, "the memory store is private to one process");
            return Err(wrong.next("leave --store out, or name a store that processes share"));
        }
        let program = std::env::current_exe().map_err(|e| {
            ExitFailure::new(Outcome::Unavailable, format!("the program cannot find itself: {e}"))
        })?;
        let view = if self.json || self.quiet { ViewMode::Hidden } else { ViewMode::Shown };
        Ok(LabOptions { program, store, fast: self.fast, view })
    }

    fn print(&self, scenario: &Scenario, outcome: &ScenarioOutcome, store: &str) -> Result<(), ExitFailure> {
        if self.json {
            let mut line = serde_json::to_value(outcome).unwrap_or(Value::Null);
            line["scenario"] = json!(scenario.name);
            line["store"] = json!(store);
            line["verdict"] = json!(outcome.verdict());
            return output::line(&line.to_string());
        }
        let mut text = Vec::new();
        if self.quiet {
            text.extend_from_slice(format!("{}: {}\n", scenario.name, scenario.title).as_bytes());
        }
        lockkeeper_lab::print_outcome(&mut text, outcome).expect("a vector takes every byte");
        output::line(&String::from_utf8_lossy(&text))
    }
}

/// Runs a scenario on a thread of its own. A signal ends it: its processes are killed and its files removed first.
async fn run(
    scenario: &'static Scenario,
    options: &LabOptions,
) -> Result<Result<ScenarioOutcome, ExitFailure>, ExitFailure> {
    let mut signals = SignalStream::ending()?;
    let options = options.clone();
    let mut playing = tokio::task::spawn_blocking(move || Lab::run(scenario, &options));
    let mut signal = None;
    let played = loop {
        tokio::select! {
            played = &mut playing => break played,
            number = signals.next() => {
                signal = Some(number);
                lockkeeper_lab::interrupt();
            }
        }
    };
    let name = scenario.name;
    let broken = |why: String| {
        ExitFailure::new(Outcome::Unknown, format!("{name}: {why}")).next("run it again, or with --json")
    };
    if let Some(signal) = signal {
        return Err(ExitFailure::silent(exit::by_signal(signal.as_raw())));
    }
    Ok(match played {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(LabError::Invalid(why))) => {
            Err(ExitFailure::new(Outcome::Unknown, format!("{name}: invalid, it proves nothing: {why}"))
                .with_code(INVALID))
        }
        Ok(Err(LabError::Broken(why))) => Err(broken(why)),
        Ok(Err(LabError::Interrupted)) => Err(broken("it was interrupted".into())),
        Err(panic) => Err(broken(panic.to_string())),
    })
}

fn missing(scenario: &Scenario) -> ExitFailure {
    let missing = scenario.missing();
    let names: Vec<&str> = missing.iter().map(|need| need.name()).collect();
    let message = format!("{} needs {}, which is not installed", scenario.name, names.join(" and "));
    ExitFailure::new(Outcome::Unavailable, message).next(Need::install(&missing))
}

/// The kind of store, without host and password.
fn store_kind(scenario: &Scenario, url: Option<&str>) -> String {
    let own: Vec<&str> = scenario.needs.iter().map(|need| need.name()).collect();
    match url.filter(|_| scenario.any_store).and_then(|url| url.split(':').next()) {
        Some(scheme) => scheme.to_owned(),
        None if own.is_empty() => "sqlite".to_owned(),
        None => own.join(", "),
    }
}

fn write_report(path: &Path, html: &str) -> Result<(), ExitFailure> {
    std::fs::write(path, html).map_err(|e| cannot_write(path, &e))
}

fn cannot_write(path: &Path, error: &std::io::Error) -> ExitFailure {
    let path = quoted(&path.to_string_lossy());
    ExitFailure::new(Outcome::Unavailable, format!("the report {path} cannot be written: {error}"))
}
