//! `lockkeeper advise`: which mechanism, often not a lock; which store, which ttl, and the risk that stays.

use std::io::{BufRead, IsTerminal, Write};
use std::time::Duration;

use clap::{Args, ValueEnum};
use lockkeeper::{Outcome, Purpose};

use crate::advice::{self, ConflictRate, HostCount, ResourceKind, RunningSystem, Situation};
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::output;

/// Say what to use for a task: a lock or something better, which store, which ttl, and the risk that stays.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AdviseArgs {
    /// Whether doing the work twice is a waste, or harm
    #[arg(long, value_name = "PURPOSE")]
    pub purpose: Option<PurposeWord>,
    /// The thing to protect
    #[arg(long, value_name = "KIND")]
    pub resource: Option<ResourceKind>,
    /// The systems that you run already; several with commas
    #[arg(long, value_name = "SYSTEM", value_delimiter = ',')]
    pub running: Vec<RunningSystem>,
    /// How long the work takes
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_wait, allow_hyphen_values = true)]
    pub work: Option<Duration>,
    /// How often two processes want the same thing at the same time
    #[arg(long, value_name = "HOW")]
    pub conflicts: Option<ConflictRate>,
    /// On how many hosts the processes run
    #[arg(long, value_name = "HOW")]
    pub hosts: Option<HostCount>,
    /// Print the worked examples as Markdown: docs/guide/choosing.md
    #[arg(long, exclusive = true)]
    pub examples: bool,
    /// Write JSON, for programs
    #[arg(long)]
    pub json: bool,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper advise                    asks, on a terminal
  lockkeeper advise --purpose correctness --resource job --running postgres --work 2h \\
                    --conflicts rarely --hosts many";

/// The purpose, as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PurposeWord {
    /// Doing it twice is a waste
    Efficiency,
    /// Doing it twice is harm
    Correctness,
}

impl AdviseArgs {
    pub fn execute(self) -> Result<i32, ExitFailure> {
        if self.examples {
            let page = advice::page();
            output::line(page.trim_end())?;
            return Ok(OK);
        }
        let as_json = self.json;
        advice::print(&self.situation()?, as_json)?;
        Ok(OK)
    }

    /// The answers of the options; those that are missing are asked for on a terminal.
    fn situation(self) -> Result<Situation, ExitFailure> {
        let purpose = match answer("--purpose", "What would doing the work twice be?", self.purpose)? {
            PurposeWord::Efficiency => Purpose::Efficiency,
            PurposeWord::Correctness => Purpose::Correctness,
        };
        let resource = answer("--resource", "What is to be protected?", self.resource)?;
        let hosts = answer("--hosts", "On how many hosts do the processes run?", self.hosts)?;
        let running = match self.running {
            given if !given.is_empty() => given,
            _ if hosts == HostCount::One => vec![RunningSystem::Nothing],
            _ => vec![answer("--running", "What do you run already?", None)?],
        };
        let conflicts =
            answer("--conflicts", "How often do two processes want the same thing at once?", self.conflicts)?;
        let work = match self.work {
            Some(work) => work,
            None => ask_duration()?,
        };
        Ok(Situation { purpose, resource, running, work, conflicts, hosts })
    }
}

fn missing(option: &str) -> ExitFailure {
    ExitFailure::new(Outcome::Invalid, format!("{option} is missing, and there is no terminal to ask on"))
        .next("lockkeeper advise --help has every option")
}

/// The next line that the user types. `None`: there is no terminal.
fn ask(question: &str) -> Option<String> {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return None;
    }
    let mut shown = std::io::stderr();
    write!(shown, "{question} ").and_then(|()| shown.flush()).ok()?;
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(read) if read > 0 => Some(line.trim().to_owned()),
        _ => None,
    }
}

/// The answer that was given; else the one that the user chooses by its number or word.
fn answer<E: ValueEnum>(option: &str, question: &str, given: Option<E>) -> Result<E, ExitFailure> {
    if let Some(given) = given {
        return Ok(given);
    }
    let choices: Vec<_> =
        E::value_variants().iter().filter_map(|value| Some((value, value.to_possible_value()?))).collect();
    let list: String = choices
        .iter()
        .enumerate()
        .map(|(n, (_, choice))| {
            let help = choice.get_help().map(ToString::to_string).unwrap_or_default();
            format!("\n  {}  {}: {help}", n + 1, choice.get_name())
        })
        .collect();
    let mut prompt = format!("{question}{list}\n>");
    loop {
        let typed = ask(&prompt).ok_or_else(|| missing(option))?;
        let by_number = typed.parse::<usize>().ok().and_then(|n| choices.get(n.checked_sub(1)?));
        let by_word = || choices.iter().find(|(_, choice)| choice.get_name() == typed);
        if let Some((value, _)) = by_number.or_else(by_word) {
            return Ok((*value).clone());
        }
        prompt = format!("a number from 1 to {}, or a word of the list\n>", choices.len());
    }
}

fn ask_duration() -> Result<Duration, ExitFailure> {
    let mut prompt = "How long does the work take? (500ms, 30s, 2h)\n>".to_owned();
    loop {
        let typed = ask(&prompt).ok_or_else(|| missing("--work"))?;
        match duration::parse_wait(&typed) {
            Ok(work) => return Ok(work),
            Err(why) => prompt = format!("{why}\n>"),
        }
    }
}
