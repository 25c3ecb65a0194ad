//! Every exit code, in one place. The table itself is [`Outcome`]; a child's own code takes the place of zero.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use lockkeeper::{Error, Outcome};
use serde_json::json;

use crate::outlet;
use crate::text::{self, plain};

/// All is well.
pub const OK: i32 = 0;
/// The command was found but could not be started; the number every shell uses.
pub const CANNOT_START: i32 = 126;
/// The command was not found; the number every shell uses.
pub const NOT_FOUND: i32 = 127;

/// Stands for the command that shows the lock, whose name is not known everywhere.
const SHOW: &str = ": lockkeeper show NAME";
/// As much of a bad value as is quoted.
const QUOTED: usize = 60;

/// The code for an end by a signal, as shells count.
pub fn by_signal(number: i32) -> i32 {
    128 + number
}

/// Why a subcommand did not do what it was asked to.
#[derive(Debug)]
pub struct Failure {
    pub code: i32,
    outcome: Outcome,
    /// Empty: everything has been said already.
    message: String,
    /// What to do next, where there is something to say.
    next: Option<String>,
}

impl Failure {
    pub fn new(outcome: Outcome, message: impl Into<String>) -> Self {
        Failure { code: outcome.exit_code().into(), outcome, message: message.into(), next: None }
    }

    /// An end that needs no more words.
    pub fn silent(code: i32) -> Self {
        Failure { code, ..Failure::new(Outcome::Done, "") }
    }

    pub fn with_code(mut self, code: i32) -> Self {
        self.code = code;
        self
    }

    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// Names the lock in what to do next; without one, no command is named that would need it.
    pub fn about(mut self, name: Option<&str>) -> Self {
        self.next = self.next.map(|next| match name {
            Some(name) => next.replace(SHOW, &format!(": lockkeeper show {}", text::shell(name))),
            None => next.replace(SHOW, ""),
        });
        self
    }

    /// Says it on stderr, for people or for machines.
    pub fn tell(&self, json: bool) {
        if self.message.is_empty() {
            return;
        }
        let mut line = String::new();
        if json {
            let mut error = json!({
                "outcome": self.outcome.word(), "message": self.message, "exit_code": self.code,
            });
            if let Some(next) = &self.next {
                error["next"] = json!(next);
            }
            line += &json!({ "error": error }).to_string();
        } else {
            // What others have written may be quoted in it.
            line = format!("lockkeeper: {}", plain(&self.message));
            if let Some(next) = &self.next {
                line += &format!("\n  next: {}", plain(next));
            }
        }
        outlet::ERR.post(line + "\n");
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let failure = Failure::new(error.outcome(), error.to_string());
        match error.outcome() {
            Outcome::Busy => failure.next(format!("wait longer, or look who has it{SHOW}")),
            Outcome::Unknown => failure.next(format!("look before you try again{SHOW}")),
            Outcome::Unavailable => failure.next("nothing happened; try again, or check the store"),
            _ => failure,
        }
    }
}

/// What clap has to say: help and version are fine, everything else is a bad call.
pub fn usage(mut error: clap::Error) -> i32 {
    if !error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return OK;
    }
    let code = Outcome::Invalid.exit_code().into();
    let wants_json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    // A name with an escape sequence in it is quoted in the message.
    for kind in [ContextKind::InvalidValue, ContextKind::InvalidArg] {
        if let Some(ContextValue::String(value)) = error.get(kind) {
            let quoted = text::cut(&plain(value), QUOTED);
            error.insert(kind, ContextValue::String(quoted));
        }
    }
    let rendered = error.render().to_string();
    let shown: String = rendered.lines().map(|line| format!("{}\n", plain(line))).collect();
    if wants_json {
        // The first line says what is wrong; the rest is usage.
        let first = shown.lines().next().unwrap_or_default();
        let failure = Failure::new(Outcome::Invalid, first.trim_start_matches("error: "));
        match dashes_missing(&error) {
            true => failure.next(DASHES).tell(true),
            false => failure.tell(true),
        }
    } else if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
    } else {
        let shown = shown.strip_prefix("error: ").unwrap_or(&shown);
        outlet::ERR.post(format!("lockkeeper: {shown}"));
        if dashes_missing(&error) {
            outlet::ERR.post(format!("  next: {DASHES}\n"));
        }
    }
    code
}

const DASHES: &str = "put -- before the command: lockkeeper run NAME -- CMD";

/// Whether a command was to be run, and nothing separates it from our own words.
fn dashes_missing(error: &clap::Error) -> bool {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let runs = ["run", "once", "elect", "cron"].iter().any(|word| words.iter().any(|w| w == word));
    let kinds = [ErrorKind::UnknownArgument, ErrorKind::MissingRequiredArgument];
    runs && kinds.contains(&error.kind()) && !words.iter().any(|word| word == "--")
}
