//! `lockkeeper man`: prints the manual page.

use clap::{Args, CommandFactory};
use lockkeeper::Outcome;

use crate::args::Cli;
use crate::exit::ExitFailure;
use crate::output;

/// Print the manual page, of the whole or of one subcommand.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ManArgs {
    /// Which subcommand
    pub command: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper man | man -l -
  lockkeeper man     > /usr/local/share/man/man1/lockkeeper.1
  lockkeeper man run > /usr/local/share/man/man1/lockkeeper-run.1";

impl ManArgs {
    pub fn execute(self) -> Result<(), ExitFailure> {
        let mut cli = Cli::command();
        cli.build();
        let page = match &self.command {
            None => cli,
            Some(name) => cli.find_subcommand(name).cloned().ok_or_else(|| {
                ExitFailure::new(Outcome::Invalid, format!("there is no subcommand {name:?}"))
                    .next("lockkeeper --help lists them")
            })?,
        };
        let whole = self.command.is_none();
        let mut text = Vec::new();
        let rendered = clap_mangen::Man::new(page).render(&mut text);
        rendered.map_err(|e| ExitFailure::new(Outcome::Unknown, format!("the page cannot be made: {e}")))?;
        let mut text = String::from_utf8_lossy(&text).into_owned();
        if whole {
            text += &exit_codes();
        }
        output::line(text.trim_end())
    }
}

/// The one table of outcomes, as a section of the page.
fn exit_codes() -> String {
    let mut text = String::from(".SH \"EXIT STATUS\"\n");
    let mut row = |code: String, meaning: &str| text += &format!(".TP\n{code}\n{meaning}\n");
    row("0".into(), "Done. For run: the exit code of the command takes its place.");
    let mut rows: Vec<Outcome> = Outcome::ALL.into_iter().filter(|o| *o != Outcome::Done).collect();
    rows.sort_by_key(|o| o.exit_code());
    for outcome in rows {
        row(outcome.exit_code().to_string(), meaning(outcome));
    }
    row("126".into(), "The command was found but could not be started.");
    row("127".into(), "The command was not found.");
    row("128+n".into(), "Ended by signal n.");
    text
}

fn meaning(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "Done.",
        Outcome::Busy => "Busy: another process holds the lock.",
        Outcome::Lost => "Lost: the lock was held and then lost; the command was ended.",
        Outcome::Stale => "Stale: a newer fence was seen.",
        Outcome::Unknown => "Unknown: the request may have been carried out.",
        Outcome::Unavailable => "Unavailable: the request was not carried out; a retry is safe.",
        Outcome::Invalid => "Invalid: a bad name, ttl or option.",
        Outcome::Unsupported => "Unsupported: this store cannot do that.",
        Outcome::Denied => "Denied: not allowed.",
        Outcome::Deadlock => "Deadlock: waiting would never end.",
        Outcome::Limited => "Limited: a limit was reached.",
        Outcome::Absent => "Absent: there is no such record.",
    }
}
