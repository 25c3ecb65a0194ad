//! `lockkeeper hold`: holds a lock without a command.

use std::io::Read;
use std::time::Duration;

use clap::Args;
use lockkeeper::{Outcome, ReleaseOutcome};
use lockkeeper_host::sleep_until;
use rustix::fs::FileType;
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::oneshot;

use crate::args::{CommonArgs, LockArgs};
use crate::exit::{self, ExitFailure};
use crate::report::{EventOutput, Report};
use crate::signals::SignalStream;
use crate::{acquire, duration, message_writer, store};
use lockkeeper::{BootInstant, Clock, SystemClock};

/// Hold a lock until stdin closes, a signal arrives or the time is over.
///
/// Prints one line as soon as the lock is held. Only a pipe or a socket on stdin counts as closing: a terminal, a file
/// or /dev/null does not.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct HoldArgs {
    #[command(flatten)]
    pub request: LockArgs,
    /// Release the lock after this long [default: never]
    #[arg(long = "for", value_name = "DURATION", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub at_most: Option<Duration>,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper hold deploy                         until Ctrl-C
  lockkeeper hold deploy --for 10m               a maintenance window
  coproc LK { lockkeeper hold deploy; }          bash: until the pipe is closed
  read -r line <&\"${LK[0]}\"                      … wait for: held \"deploy\", fence 17
  eval \"exec ${LK[1]}>&-\"                        … release the lock

Prints one line as soon as the lock is held. Only a pipe or a socket on stdin can close: a
terminal, a file or /dev/null does not end it.
Exit codes: 0 when stdin closed or the time was over, 128+n for a signal, 75 busy, 76 lost.";

/// How long the release of a lost lock may take.
const RELEASE: Duration = Duration::from_secs(2);

enum HoldEnd {
    Asked,
    Signal(Signal),
    Lost(lockkeeper::Error),
}

impl HoldArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let report = Report::new(self.request.names(), self.common.json, false, EventOutput::Stdout);
        self.request.check()?;
        let (keeper, wait) = store::open(self.common.url()?.expose(), self.request.wait, &report).await?;
        if keeper.profile().store == "memory" && !self.request.lease.correctness {
            report.say(
                "warning: a memory: store is private to this process. This lock excludes no other process",
            );
        }
        let mut signals = SignalStream::ending()?;
        let guard = acquire::acquire_lock(
            &keeper,
            &self.request,
            Some("lockkeeper hold".into()),
            wait,
            false,
            &report,
            &mut signals,
        )
        .await?;
        let end_at = self.at_most.map_or(BootInstant::NEVER, |span| SystemClock.now() + span);
        report.granted(&guard);
        if !self.common.json {
            // A reader that is gone is known by a closed stdin, not from here.
            message_writer::STDOUT.enqueue(format!("held {}, fence {}\n", report.what(), guard.fence()));
        }
        let end = tokio::select! {
            biased;
            loss = guard.lost() => HoldEnd::Lost(loss),
            signal = signals.next_ending() => HoldEnd::Signal(signal),
            () = stdin_closed() => HoldEnd::Asked,
            () = sleep_until(&SystemClock, end_at) => HoldEnd::Asked,
        };
        let fence = guard.fence();
        let interrupted = |_| Err(lockkeeper::Error::Unknown("a signal came first".into()));
        if let HoldEnd::Lost(loss) = end {
            // Reported first: an unreachable store would delay the report past the deadline. A revoked lock is still given back.
            report.event("lost", json!({ "fence": fence, "why": loss.to_string() }));
            let _ = signals.race(tokio::time::timeout(RELEASE, guard.release())).await;
            return Err(loss.into());
        }
        let release = signals.race(guard.release()).await.unwrap_or_else(interrupted);
        match end {
            _ if matches!(release, Ok(ReleaseOutcome::AlreadyGone)) => {
                report.event("lost", json!({ "fence": fence }));
                Err(ExitFailure::new(
                    Outcome::Lost,
                    format!("the lock on {} had been lost before it was let go", report.what()),
                ))
            }
            end => {
                release?;
                report.event("released", json!({ "fence": fence }));
                Ok(match end {
                    HoldEnd::Signal(signal) => exit::by_signal(signal.as_raw()),
                    _ => exit::OK,
                })
            }
        }
    }
}

/// Ends when the other end of stdin is closed; never if stdin has no other end.
async fn stdin_closed() {
    let kind = rustix::fs::fstat(rustix::stdio::stdin()).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if !matches!(kind, Ok(FileType::Fifo | FileType::Socket)) {
        return std::future::pending().await;
    }
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        while input.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
        let _ = sender.send(());
    });
    let _ = receiver.await;
}
