use std::io::Read;
use std::time::Duration;

use clap::Args;
use lockkeeper::{Outcome, Release};
use lockkeeper_host::sleep_until;
use rustix::fs::FileType;
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::oneshot;

use crate::args::{Ask, Common};
use crate::exit::{self, Failure};
use crate::report::{Events, Report};
use crate::signals::Signals;
use crate::{outlet, span, store, waiting};
use lockkeeper::{Clock, Moment, SystemClock};

/// Hold a lock until stdin closes, a signal comes or the time is over.
///
/// Prints one line as soon as the lock is held. Only a pipe or a socket on stdin counts as closing: a terminal, a file
/// or /dev/null does not.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Hold {
    #[command(flatten)]
    pub ask: Ask,
    /// Let go after this long [default: never]
    #[arg(long = "for", value_name = "SPAN", value_parser = span::long, allow_hyphen_values = true)]
    pub at_most: Option<Duration>,
    #[command(flatten)]
    pub common: Common,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper hold deploy                         until Ctrl-C
  lockkeeper hold deploy --for 10m               a maintenance window
  coproc LK { lockkeeper hold deploy; }          bash: until the pipe is closed
  read -r line <&\"${LK[0]}\"                      … wait for: held \"deploy\", fence 17
  eval \"exec ${LK[1]}>&-\"                        … let go

Prints one line as soon as the lock is held. Only a pipe or a socket on stdin can close: a
terminal, a file or /dev/null does not end it.
Exit codes: 0 when stdin closed or the time was over, 128+n for a signal, 75 busy, 76 lost.";

enum End {
    Asked,
    Signal(Signal),
    Lost(lockkeeper::Error),
}

impl Hold {
    pub async fn go(self) -> Result<i32, Failure> {
        let report = Report::new(self.ask.names(), self.common.json, false, Events::Stdout);
        self.ask.check()?;
        let (keeper, wait) = store::open(self.common.url()?.expose(), self.ask.wait, &report).await?;
        if keeper.profile().store == "memory" && !self.ask.correctness {
            report.say("warning: a memory: store is private to this process. This lock keeps nobody out");
        }
        let mut signals = Signals::ending()?;
        let guard =
            waiting::acquire(&keeper, &self.ask, Some("hold".into()), wait, &report, &mut signals).await?;
        let end_at = self.at_most.map_or(Moment::NEVER, |span| SystemClock.now() + span);
        report.granted(&guard);
        if !self.common.json {
            // A reader that is gone is known by a closed stdin, not from here.
            outlet::OUT.post(format!("held {}, fence {}\n", report.what(), guard.fence()));
        }
        let end = tokio::select! {
            biased;
            loss = guard.lost() => End::Lost(loss),
            signal = signals.end() => End::Signal(signal),
            () = stdin_closed() => End::Asked,
            () = sleep_until(&SystemClock, end_at) => End::Asked,
        };
        let fence = guard.fence();
        let interrupted = |_| Err(lockkeeper::Error::Unknown("a signal came first".into()));
        let release = signals.or_end(guard.release()).await.unwrap_or_else(interrupted);
        match end {
            End::Lost(loss) => {
                report.event("lost", json!({ "fence": fence, "why": loss.to_string() }));
                Err(loss.into())
            }
            _ if matches!(release, Ok(Release::AlreadyGone)) => {
                report.event("lost", json!({ "fence": fence }));
                Err(Failure::new(
                    Outcome::Lost,
                    format!("the lock on {} had been lost before it was let go", report.what()),
                ))
            }
            end => {
                release?;
                report.event("released", json!({ "fence": fence }));
                Ok(match end {
                    End::Signal(signal) => exit::by_signal(signal.as_raw()),
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
    let (tell, told) = oneshot::channel();
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        while input.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
        let _ = tell.send(());
    });
    let _ = told.await;
}
