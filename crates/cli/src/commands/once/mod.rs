//! `lockkeeper once`: a command that runs once under a key, and whose result later calls get.

mod stored_output;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use clap::Args;
use lockkeeper::once::{Done, OnFailure, OnceStart, RunPermit, Stored};
use lockkeeper::{Clock, LockName, Lockkeeper, Outcome, SystemClock};
use lockkeeper_host::host_name;
use rustix::process::Signal;
use serde_json::json;
use stored_output::StoredOutput;

use crate::args::{JobArgs, JobMetricsArgs, LeaseArgs, NameArgs, utf8};
use crate::child::capture::OutputCapture;
use crate::child::job::{self, CommandJob, ExpiringHold};
use crate::child::supervisor::CommandEnd;
use crate::duration;
use crate::exit::{self, ExitFailure};
use crate::replay::{check_delivered, check_nested, claim_failure, print_streams};
use crate::report::Report;
use crate::signals::SignalStream;
use crate::store::{self, StoreSource};

/// Run a command once under a key; later calls get the same output and exit code.
///
/// The first caller runs the command. Callers that come meanwhile wait for the result, and later callers get it at once: the same
/// bytes on stdout and stderr, the same exit code.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct OnceArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// How long the store keeps the result; a call after that runs the command again
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub keep: Duration,
    /// Keep the result of a command that failed, too [default: the next call runs it again]
    #[arg(long)]
    pub keep_failures: bool,
    /// The text that the key stands for: a call with another text under the same key is refused [default: the command line]
    #[arg(long, value_name = "TEXT", value_parser = utf8("fingerprint"))]
    pub fingerprint: Option<String>,
    /// Wait for the run of another process for at most this long, then exit 75 [default: for ever]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_wait, allow_hyphen_values = true)]
    pub wait: Option<Duration>,
    /// Do not wait: exit 75 if another process runs the command
    #[arg(long, conflicts_with = "wait")]
    pub skip: bool,
    #[command(flatten)]
    pub lease: LeaseArgs,
    #[command(flatten)]
    pub metrics: JobMetricsArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper once invoice-4711 -- ./send-invoice 4711       sent once, however often this is called
  lockkeeper once migrate-v17 --keep 720h -- ./migrate.sh
  lockkeeper once probe --keep-failures -- ./probe          a failure is a result, too

The command gets LOCKKEEPER_KEY, LOCKKEEPER_FENCE (the fencing token) and the other variables of
`run`. The store keeps the first MiB of stdout and of stderr, and once says if there was more. If the
process that runs the command dies, the next caller runs it again, with a higher fence: the command
must check the fence where it writes, or tolerate being run twice.

Exit codes: the command's own, of this run or the stored one; 64 the key stands for another command,
75 another process runs it, 76 the lock was lost, 65 another process took over and its result
counts, 78 the store has no records.";

/// The pause before an unreachable store is asked again.
const PAUSE: Duration = Duration::from_secs(1);

impl OnceArgs {
    fn key(&self) -> &LockName {
        self.named.get()
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let report = self.job.report(std::iter::once(self.key()));
        let report = self.metrics.keep(report, "once", self.key());
        report.finish(self.run_once(&report).await)
    }

    async fn run_once(&self, report: &Report) -> Result<i32, ExitFailure> {
        self.job.check()?;
        self.named.check_key()?;
        let source = self.job.common.source()?;
        let (keeper, wait) = store::open(source.url.expose(), self.wait, report).await?;
        let mut signals = SignalStream::forwarded()?;
        match signals.race(check_nested(&keeper, &source, "once", self.key())).await {
            Ok(nested) => nested?,
            Err(signal) => return Ok(exit::by_signal(signal.as_raw())),
        }
        match self.claim(&keeper, wait, &mut signals, report).await? {
            OnceStart::Done(done) => self.replay(&done, &mut signals, report).await,
            OnceStart::Run(permit) => {
                let ended = self.run(*permit, &keeper, &source, &mut signals, report).await;
                signals.settle(&keeper).await;
                ended
            }
        }
    }

    /// Claims the key. Within `wait` an outage is waited for: nothing has run yet.
    async fn claim(
        &self,
        keeper: &Lockkeeper,
        wait: Option<Duration>,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<OnceStart, ExitFailure> {
        let end = wait.map(|wait| SystemClock.now() + wait);
        let mut reported = false;
        loop {
            let claimed = self.claim_once(keeper, end.map(store::left), signals, report).await;
            let failure = match claimed {
                Ok(Err(error)) if is_outage(&error) && end.is_some_and(|end| SystemClock.now() < end) => {
                    error
                }
                Ok(claimed) => {
                    return claimed.map_err(|error| claim_failure(error, self.skip, report));
                }
                Err(signal) => return Err(ExitFailure::silent(signals.flush_releases(keeper, signal).await)),
            };
            if !reported {
                report.say(&format!("{failure}; asking again"));
                reported = true;
            }
            report.event("retry", json!({ "why": failure.to_string() }));
            let pause = PAUSE.min(end.map(store::left).unwrap_or_default());
            if let Err(signal) = signals.race(tokio::time::sleep(pause)).await {
                return Err(ExitFailure::silent(signals.flush_releases(keeper, signal).await));
            }
        }
    }

    async fn claim_once(
        &self,
        keeper: &Lockkeeper,
        wait: Option<Duration>,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<lockkeeper::Result<OnceStart>, Signal> {
        let on_failure = if self.keep_failures { OnFailure::Keep } else { OnFailure::Retry };
        let mut once =
            keeper.once(self.key().as_str()).ttl(self.lease.ttl).keep(self.keep).on_failure(on_failure);
        once = match &self.fingerprint {
            Some(text) => once.fingerprint(text),
            None => once.fingerprint(command_line(&self.job.command)),
        };
        match (self.skip, wait) {
            (true, _) => once = once.wait(Duration::ZERO),
            (_, Some(wait)) => once = once.wait(wait),
            _ => {}
        }
        if self.lease.correctness {
            once = once.for_correctness();
        }
        let wait = async {
            while !self.is_run_by_another(keeper).await {}
            report.say(&format!("waiting for {}: another process runs it", report.what()));
            std::future::pending().await
        };
        tokio::select! {
            biased;
            claim = once.claim() => Ok(claim),
            signal = signals.next_ending() => Err(signal),
            never = wait => never,
        }
    }

    /// Whether another process runs the command, and this call does not only wait for a slow store.
    async fn is_run_by_another(&self, keeper: &Lockkeeper) -> bool {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let seen = keeper.inspect(&format!("once/{}", self.key())).await;
        let held = seen.ok().flatten().map(|lock| lock.held).unwrap_or_default();
        held.iter().any(|held| held.holder.pid != std::process::id() || held.holder.host != host_name())
    }

    async fn run(
        &self,
        permit: RunPermit,
        keeper: &Lockkeeper,
        source: &StoreSource,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<i32, ExitFailure> {
        report.granted(permit.guard());
        let (capture, pipes) = OutputCapture::start().map_err(|e| {
            ExitFailure::new(Outcome::Unavailable, format!("the operating system gives no pipe: {e}"))
        })?;
        let name = permit.guard().names().first().clone();
        let env = ("LOCKKEEPER_KEY", self.key().to_string());
        let job = CommandJob { pipes: Some(pipes), ..self.job.job(&name, source, Some(env)) };
        let (code, asked) = match job.supervise(permit.guard(), signals, report).await? {
            CommandEnd::Itself { code, asked } => (code, asked),
            CommandEnd::Lost { why, code, all_gone, .. } => {
                report.event("ended", json!({ "outcome": "lost", "fence": permit.fence() }));
                if all_gone {
                    drop(permit);
                } else {
                    let hold = ExpiringHold::of(permit.guard());
                    permit.let_expire();
                    hold.outlast(keeper, signals, report).await;
                }
                return Err(job::lost(&report.what(), &why, code, all_gone));
            }
        };
        let captured = match capture.finish(asked, signals).await {
            Ok(captured) => captured,
            Err(e) => return Err(record_without_output(permit, code, &e, signals).await),
        };
        let output = StoredOutput { code, out: captured.out, err: captured.err };
        output.report_cut(report);
        let fence = permit.fence();
        let stored = Stored { ok: code == 0, bytes: output.bytes() };
        match signals.race(permit.finish(stored)).await.unwrap_or_else(interrupted) {
            Ok(()) => {}
            // Nothing is kept of a failure that is to be retried: the next call runs the command again in any case.
            Err(error) if code != 0 && !self.keep_failures && !is_taken_over(&error) => {
                report.say(&format!("warning: the record of the failed run was not removed: {error}"));
            }
            Err(error) => return Err(not_kept(code, &error)),
        }
        report.event("ended", json!({ "outcome": "done", "fence": fence, "exit_code": code }));
        check_delivered(captured.undelivered, captured.signal)?;
        Ok(code)
    }

    /// Prints the stored result, byte for byte.
    async fn replay(
        &self,
        done: &Done<Stored>,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<i32, ExitFailure> {
        let Some(printed) = StoredOutput::parse(&done.result.bytes) else {
            let message = format!("the result of {} was not stored by this command", report.what());
            return Err(ExitFailure::new(Outcome::Invalid, message).next("use another key"));
        };
        print_streams(printed.out.bytes.clone(), printed.err.bytes.clone(), signals).await?;
        printed.report_cut(report);
        report.event("replayed", json!({ "fence": done.fence, "exit_code": printed.code }));
        Ok(printed.code)
    }
}

fn interrupted<T>(_: Signal) -> lockkeeper::Result<T> {
    Err(lockkeeper::Error::Unknown("a signal came first".into()))
}

fn is_taken_over(error: &lockkeeper::Error) -> bool {
    matches!(error.outcome(), Outcome::Stale | Outcome::Lost)
}

/// The failure of a call whose command has run, and whose result is not stored.
fn not_kept(code: i32, error: &lockkeeper::Error) -> ExitFailure {
    let message = format!("the command ended with {code}, but its result was not kept: {error}");
    ExitFailure::new(error.outcome(), message).next(match error.outcome() {
        Outcome::Stale => "ask again with the same key to get the result that counts",
        _ => "look what was done before you ask again with the same key",
    })
}

/// Records that the command has run and that its output could not be read. A command that is done is not run again for that.
async fn record_without_output(
    permit: RunPermit,
    code: i32,
    e: &std::io::Error,
    signals: &mut SignalStream,
) -> ExitFailure {
    let why = format!("the command ended with {code}, but {e}");
    let recorded = signals.race(permit.finish_without_result(code == 0, &why)).await;
    match recorded.unwrap_or_else(interrupted) {
        // A failure that is to be retried.
        Ok(()) => ExitFailure::new(Outcome::Unknown, format!("{why}; nothing was kept")),
        Err(error) => not_kept(code, &error),
    }
}

/// Whether the store did not answer, or not in time: the lease ended before the run could begin.
fn is_outage(error: &lockkeeper::Error) -> bool {
    matches!(error.outcome(), Outcome::Unavailable | Outcome::Unknown | Outcome::Lost | Outcome::Stale)
}

/// The words of a command line, each with its length, so that no two command lines look the same.
fn command_line(command: &[OsString]) -> Vec<u8> {
    command
        .iter()
        .flat_map(|word| [format!("{} ", word.len()).as_bytes(), word.as_bytes()].concat())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command had run, its output could not be read, and the next call ran it again.
    #[tokio::test]
    async fn a_command_whose_output_cannot_be_read_is_not_run_again() {
        let keeper = Lockkeeper::open("memory:").await.unwrap();
        let mut signals = SignalStream::forwarded().unwrap();
        let e = std::io::Error::other("its output could not be read");
        let permit = async || match keeper.once("k").claim().await {
            Ok(OnceStart::Run(permit)) => Ok(*permit),
            Ok(OnceStart::Done(done)) => panic!("there is no result: {done:?}"),
            Err(error) => Err(error),
        };
        // A failure that is to be retried leaves nothing.
        let failure = record_without_output(permit().await.unwrap(), 3, &e, &mut signals).await;
        assert_eq!(failure.code, 74, "{failure:?}");
        let failure = record_without_output(permit().await.unwrap(), 0, &e, &mut signals).await;
        assert_eq!(failure.code, 74, "{failure:?}");
        let again = permit().await;
        assert!(
            matches!(&again, Err(lockkeeper::Error::Unknown(why)) if why.contains("could not be read")),
            "it is run again: {again:?}"
        );
    }
}
