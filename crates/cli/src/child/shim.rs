//! The process that starts the command: this program again, for a moment.
//!
//! A command must not run on without its lock when `lockkeeper run` is killed with `kill -9`. The kernel kills
//! a process when its parent dies if the process itself has requested that, before it becomes the command. So the command
//! is started in two steps: this program requests it, and then becomes the command.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

use lockkeeper::Outcome;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use crate::exit::{self, ExitFailure};
use crate::{message_writer, signals};

/// The first word on its command line.
pub const SUBCOMMAND: &str = "__exec";

/// How it says that the command cannot be started.
const JSON: &str = "json";
const TEXT: &str = "text";

/// The command line that starts `command` through the shim.
pub fn command(command: &[impl AsRef<OsStr>], json: bool) -> Command {
    // The running file itself, even if it has been replaced by an upgrade meanwhile.
    let mut shim = Command::new("/proc/self/exe");
    let errors = if json { JSON } else { TEXT };
    shim.arg0("lockkeeper").args([SUBCOMMAND, &getpid().as_raw_pid().to_string(), errors]).args(command);
    shim
}

/// Becomes the command. Returns an exit code if that cannot be.
pub fn main(mut words: impl Iterator<Item = OsString>) -> i32 {
    let parent = words.next().and_then(|word| word.to_str()?.parse::<i32>().ok());
    let (Some(parent), Some(errors), Some(program)) = (parent, words.next(), words.next()) else {
        return Outcome::Invalid.exit_code().into();
    };
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // If the parent died before the call above, the kernel would send no signal any more.
    if getppid().is_none_or(|pid| pid.as_raw_pid() != parent) {
        return exit::by_signal(Signal::KILL.as_raw());
    }
    signals::unblock_for_command();
    let error = Command::new(&program).args(words).exec();
    let code = if error.kind() == ErrorKind::NotFound { exit::NOT_FOUND } else { exit::CANNOT_START };
    let message = format!("{} cannot be started: {error}", program.display());
    ExitFailure::new(Outcome::Unavailable, message).with_code(code).print(errors == JSON);
    message_writer::STDERR.flush(message_writer::FINAL_FLUSH);
    code
}
