//! Every exit code, in one place. The table itself is [`Outcome`]; a child's own code takes the place of zero.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use lockkeeper::{Error, Outcome};
use serde_json::json;

use crate::message_writer;
use crate::text::{self, plain};

/// Success.
pub const OK: i32 = 0;
/// The command was found but could not be started; the number every shell uses.
pub const CANNOT_START: i32 = 126;
/// The command was not found; the number every shell uses.
pub const NOT_FOUND: i32 = 127;

/// Stands for the command that shows the lock, whose name is not known everywhere: [`ExitFailure::about`] fills it in.
const SHOW: &str = ": lockkeeper show NAME";
/// As much of a bad value as is quoted.
const QUOTED: usize = 60;

/// The code for an end by a signal, as shells count.
pub fn by_signal(number: i32) -> i32 {
    128 + number
}

/// Why a subcommand failed.
#[derive(Debug)]
pub struct ExitFailure {
    pub code: i32,
    outcome: Outcome,
    /// Empty: there is nothing more to print.
    message: String,
    /// The next action for the user, if one is known.
    next: Option<String>,
}

impl ExitFailure {
    pub fn new(outcome: Outcome, message: impl Into<String>) -> Self {
        ExitFailure { code: outcome.exit_code().into(), outcome, message: message.into(), next: None }
    }

    /// An end with this exit code and without a message.
    pub fn silent(code: i32) -> Self {
        ExitFailure { code, ..ExitFailure::new(Outcome::Done, "") }
    }

    pub fn with_code(mut self, code: i32) -> Self {
        self.code = code;
        self
    }

    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// Fills in the command that shows what the call is about; without one, removes the advice to look at it.
    pub fn about(mut self, show: Option<&str>) -> Self {
        self.next = self.next.map(|next| match show {
            Some(show) => next.replace(SHOW, &format!(": lockkeeper {show}")),
            None => next.replace(SHOW, ""),
        });
        self
    }

    /// Prints the failure to stderr, as text or as JSON.
    pub fn print(&self, json: bool) {
        if self.message.is_empty() {
            return;
        }
        let mut line = String::new();
        if json {
            let mut error = json!({
                "outcome": self.outcome.as_str(), "message": self.message, "exit_code": self.code,
            });
            if let Some(next) = &self.next {
                error["next"] = json!(next);
            }
            line += &json!({ "error": error }).to_string();
        } else {
            // The message may quote text of other users.
            line = format!("lockkeeper: {}", plain(&self.message));
            if let Some(next) = &self.next {
                line += &format!("\n  next: {}", plain(next));
            }
        }
        message_writer::STDERR.enqueue(line + "\n");
    }
}

impl From<Error> for ExitFailure {
    fn from(error: Error) -> Self {
        let failure = ExitFailure::new(error.outcome(), error.to_string());
        match error.outcome() {
            Outcome::Busy => failure.next(format!("wait longer, or look who has it{SHOW}")),
            Outcome::Unknown => failure.next(format!("look before you try again{SHOW}")),
            Outcome::Unavailable => failure.next("nothing happened; try again, or check the store"),
            _ => failure,
        }
    }
}

/// Prints an error of clap and returns the exit code: 0 for help and version, else that of a bad call.
pub fn usage(mut error: clap::Error) -> i32 {
    if !error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return OK;
    }
    let code = Outcome::Invalid.exit_code().into();
    let wants_json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    // A name with an escape sequence in it is quoted in the message, and a line break in it would forge a message.
    let mut escaped = false;
    for kind in [ContextKind::InvalidValue, ContextKind::InvalidArg, ContextKind::InvalidSubcommand] {
        if let Some(ContextValue::String(value)) = error.get(kind) {
            escaped |= plain(value) != value.as_str();
            let quoted = text::cut(&plain(value), QUOTED);
            error.insert(kind, ContextValue::String(quoted));
        }
    }
    let next = advice(&error);
    // A suggestion repeats the value as it came.
    if next.is_some() || escaped {
        // To put `--` before a name would make it the command.
        let _ = error.remove(ContextKind::Suggested);
    }
    let rendered = error.render().to_string();
    let shown: String = rendered.lines().map(|line| format!("{}\n", plain(line))).collect();
    if wants_json {
        // The first line says what is wrong; the rest is usage.
        let first = shown.lines().next().unwrap_or_default();
        let failure = ExitFailure::new(Outcome::Invalid, first.trim_start_matches("error: "));
        match next {
            Some(next) => failure.next(next).print(true),
            None => failure.print(true),
        }
    } else if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
    } else {
        let shown = shown.strip_prefix("error: ").unwrap_or(&shown);
        message_writer::STDERR.enqueue(format!("lockkeeper: {shown}"));
        if let Some(next) = next {
            message_writer::STDERR.enqueue(format!("  next: {next}\n"));
        }
    }
    code
}

/// The subcommands whose name may be given by `--name`, and the rest of their call.
const NAMED: [(&str, &str); 9] = [
    ("run", " -- CMD"),
    ("once", " -- CMD"),
    ("cached", " --ttl 5m -- CMD"),
    ("elect", " -- CMD"),
    ("cron", " --every FIELDS -- CMD"),
    ("hold", ""),
    ("limit", " --rate 10/s -- CMD"),
    ("claim", " --from FILE -- CMD"),
    ("partitions", " --count N -- CMD"),
];
/// The subcommands among them that need no command: if an argument is missing there, it is another one.
const WITHOUT_COMMAND: [&str; 4] = ["hold", "limit", "claim", "partitions"];

/// The hint for a bad call that clap has none for.
fn advice(error: &clap::Error) -> Option<String> {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let (subcommand, rest) = *NAMED.iter().find(|(named, _)| words.iter().any(|word| word == named))?;
    if let Some(name) = dashed_name(error) {
        return Some(format!(
            "if that is the name of the lock: lockkeeper {subcommand} --name={}{rest}",
            text::shell(&name).trim_start_matches("-- ")
        ));
    }
    let kinds = [ErrorKind::UnknownArgument, ErrorKind::MissingRequiredArgument];
    let dashes = WITHOUT_COMMAND.contains(&subcommand) || words.iter().any(|word| word == "--");
    let missing = kinds.contains(&error.kind()) && !dashes;
    missing.then(|| format!("put -- before the command: lockkeeper {subcommand} NAME{rest}"))
}

/// An unknown option that may be meant as a name.
fn dashed_name(error: &clap::Error) -> Option<String> {
    match (error.kind(), error.get(ContextKind::SuggestedArg), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, None, Some(ContextValue::String(word))) if word.starts_with('-') => {
            Some(word.clone())
        }
        _ => None,
    }
}
