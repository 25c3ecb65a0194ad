//! The part that `once` and `cached` share: printing stored output, and refusing a call inside its own command, or one that does not wait.

use std::io::Write;

use lockkeeper::{LockName, Lockkeeper, Outcome};
use rustix::process::Signal;

use crate::exit::{self, ExitFailure};
use crate::report::Report;
use crate::signals::SignalStream;
use crate::store::StoreSource;
use crate::text::quoted;

/// Fails if this process runs inside the command of the same key of the same recipe: it would wait for itself.
pub async fn check_nested(
    keeper: &Lockkeeper,
    source: &StoreSource,
    recipe: &str,
    key: &LockName,
) -> Result<(), ExitFailure> {
    let set = |name: &str| std::env::var(name).unwrap_or_default();
    let store = source.environment(false);
    let same = store.iter().all(|(name, value)| set(name) == value.as_deref().unwrap_or_default());
    if set("LOCKKEEPER_KEY") != key.as_str() || !same {
        return Ok(());
    }
    let name = LockName::new(format!("{recipe}/{key}"))?;
    let view = keeper.inspect(&name).await?;
    let ours = set("LOCKKEEPER_FENCE");
    if view.is_some_and(|view| view.held.iter().any(|held| held.fence.to_string() == ours)) {
        let message =
            format!("this call is part of the command that runs under the key {}", quoted(key.as_str()));
        return Err(ExitFailure::new(Outcome::Deadlock, message).next("give the inner call a key of its own"));
    }
    Ok(())
}

/// The failure of a claim. With `--skip` and `--quiet` a busy key is no error to print: the exit code says it.
pub fn claim_failure(error: lockkeeper::Error, skip: bool, report: &Report) -> ExitFailure {
    match error.outcome() {
        Outcome::Busy if skip && report.is_quiet() => ExitFailure::silent(Outcome::Busy.exit_code().into()),
        _ => error.into(),
    }
}

/// Prints stored output, byte for byte.
pub async fn print_streams(
    out: Vec<u8>,
    err: Vec<u8>,
    signals: &mut SignalStream,
) -> Result<(), ExitFailure> {
    // On a thread, because a reader that does not read must not keep a signal from ending this process.
    let (sender, receiver) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let out = print(std::io::stdout(), &out);
        let _ = sender.send(print(std::io::stderr(), &err).and(out));
    });
    match signals.race(receiver).await {
        Ok(written) => check_delivered(written.ok().and_then(Result::err), None),
        Err(signal) => check_delivered(None, Some(signal)),
    }
}

/// Writes all of `bytes`. A reader that has gone away is no error: the result is the same.
fn print(mut to: impl Write, bytes: &[u8]) -> std::io::Result<()> {
    match to.write_all(bytes).and_then(|()| to.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Fails if this caller did not get the whole output, although the store has the result.
pub fn check_delivered(error: Option<std::io::Error>, signal: Option<Signal>) -> Result<(), ExitFailure> {
    if let Some(signal) = signal {
        return Err(ExitFailure::silent(exit::by_signal(signal.as_raw())));
    }
    let Some(error) = error else { return Ok(()) };
    Err(ExitFailure::new(
        Outcome::Unknown,
        format!("the result is kept, but not all of it could be printed: {error}"),
    )
    .next("ask again with the same key to get all of it"))
}
