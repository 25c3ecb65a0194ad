//! Every exit code, in one place. The table itself is [`Outcome`]; a child's own code takes the place of zero.

use std::io::Write;

use clap::error::ErrorKind;
use lockkeeper::{Error, Outcome};
use serde_json::json;

use crate::text::plain;

/// All is well.
pub const OK: i32 = 0;
/// The command was found but could not be started; the number every shell uses.
pub const CANNOT_START: i32 = 126;
/// The command was not found; the number every shell uses.
pub const NOT_FOUND: i32 = 127;

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

    /// Says it on stderr, for people or for machines.
    pub fn tell(&self, json: bool) {
        if self.message.is_empty() {
            return;
        }
        let mut text = String::new();
        if json {
            let mut error = json!({
                "outcome": self.outcome.word(), "message": self.message, "exit_code": self.code,
            });
            if let Some(next) = &self.next {
                error["next"] = json!(next);
            }
            text += &json!({ "error": error }).to_string();
        } else {
            text = format!("lockkeeper: {}", self.message);
            if let Some(next) = &self.next {
                text += &format!("\n  next: {next}");
            }
        }
        // Nobody is left to tell if stderr is gone.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let failure = Failure::new(error.outcome(), error.to_string());
        match error.outcome() {
            Outcome::Busy => failure.next("wait with --wait, or see who it is with: lockkeeper show NAME"),
            Outcome::Unknown => failure.next("look before you try again: lockkeeper show NAME"),
            Outcome::Unavailable => failure.next("nothing happened; try again, or check the store"),
            _ => failure,
        }
    }
}

/// What clap has to say: help and version are fine, everything else is a bad call.
pub fn usage(error: &clap::Error) -> i32 {
    if !error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return OK;
    }
    let code = Outcome::Invalid.exit_code().into();
    let wants_json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    // A name with an escape sequence in it is quoted in the message.
    let text = error.render().to_string();
    let text: String = text.lines().map(|line| format!("{}\n", plain(line))).collect();
    if wants_json {
        // The first line says what is wrong; the rest is usage.
        let first = text.lines().next().unwrap_or_default();
        Failure::new(Outcome::Invalid, first.trim_start_matches("error: ")).tell(true);
    } else if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
    } else {
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        let _ = write!(std::io::stderr(), "lockkeeper: {text}");
    }
    code
}
