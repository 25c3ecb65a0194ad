//! Everything that goes to stdout. A reader that has gone away (`| head`) ends the command quietly.

use std::io::{ErrorKind, IsTerminal, Write};

use lockkeeper::Outcome;

use crate::exit::{ExitFailure, OK};

/// Writes one line to stdout, at once.
pub fn line(text: &str) -> Result<(), ExitFailure> {
    check_written(writeln!(std::io::stdout(), "{text}"))
}

/// Writes bytes to stdout as they are; for a person, with an end of line.
pub fn bytes(bytes: &[u8]) -> Result<(), ExitFailure> {
    let end: &[u8] = if is_terminal() { b"\n" } else { b"" };
    check_written(std::io::stdout().write_all(&[bytes, end].concat()))
}

fn check_written(written: std::io::Result<()>) -> Result<(), ExitFailure> {
    match written.and_then(|()| std::io::stdout().flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Err(ExitFailure::silent(OK)),
        Err(e) => Err(ExitFailure::new(Outcome::Unknown, format!("stdout cannot be written: {e}"))),
    }
}

/// Whether stdout is a terminal that a person looks at.
pub fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// `text` in bold, on terminals that show it and for people who want it.
pub fn bold(text: &str) -> String {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
        || std::env::var_os("TERM").is_some_and(|t| t == "dumb");
    if plain || !is_terminal() { text.to_owned() } else { format!("\x1b[1m{text}\x1b[0m") }
}
