use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use lockkeeper::{Guard, Lockkeeper, Outcome, Release};
use serde_json::json;

use crate::args::{Ask, Common};
use crate::child::job::{self, Job};
use crate::child::supervise::End;
use crate::exit::Failure;
use crate::report::{Events, Report};
use crate::signals::Signals;
use crate::{span, waiting};

/// Run a command under a lock, and exit with its exit code.
///
/// Waits for the lock, then runs the command in its own process group. If the lock is about to be lost, the command and
/// everything it started get TERM, and KILL before the deadline.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    #[command(flatten)]
    pub ask: Ask,
    /// Time between TERM and KILL if the lock is lost; at most a quarter of the ttl
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = span::up_to_a_day, allow_hyphen_values = true)]
    pub grace: Duration,
    /// Say nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
    #[command(flatten)]
    pub common: Common,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper run nightly -- ./settle.sh                 wait for ever
  lockkeeper run nightly --skip -- ./settle.sh          exit 75 if it is taken
  lockkeeper run nightly --min-hold 1m -- ./settle.sh   cron on many hosts, clocks a little apart
  lockkeeper run a --also b --wait 5s -- ./move.sh      both or none
  lockkeeper run gpu --permits 4 -- ./train.sh          at most four at a time

The command runs in its own process group and sees LOCKKEEPER_NAME, LOCKKEEPER_FENCE,
LOCKKEEPER_STORE and LOCKKEEPER_TTL_MS. Send the fence along with every write to a resource that
can check it. Signals are passed on; Ctrl-C twice kills. If the lock is about to be lost, the
command and everything it started get TERM, and KILL before the deadline.

Exit codes: the command's own, 128+n for a signal; 75 busy, 76 lost, 126 and 127 if it cannot be
started, 64 bad call, 69 store unavailable, 78 the store cannot do that.";

impl Run {
    pub async fn go(self) -> Result<i32, Failure> {
        let report = Report::new(self.ask.names(), self.common.json, self.quiet, Events::Stderr);
        self.ask.check()?;
        job::check(&self.command)?;
        let url = self.common.url()?;
        let keeper = Lockkeeper::open(&url).await?;
        if keeper.profile().store == "memory" && !self.ask.correctness {
            report.say("warning: a memory: store is private to this process. This lock keeps nobody out");
        }
        let mut signals = Signals::forwarded()?;
        let guard =
            waiting::acquire(&keeper, &self.ask, job::label(&self.command), &report, &mut signals).await?;
        report.granted(&guard);
        let end = self.supervise(&url, &guard, &mut signals, &report).await;
        let released = release(&keeper, guard, &report).await;
        match end? {
            End::Itself(code) if released != Some(Release::AlreadyGone) => {
                report.event("ended", json!({ "outcome": "done", "exit_code": code }));
                Ok(code)
            }
            End::Itself(code) => Err(Failure::new(
                Outcome::Lost,
                format!(
                    "the command ended with {code}, but the lock on {} was lost before that",
                    report.what()
                ),
            )
            .next("somebody else may have been at it at the same time: check the result")),
            End::Lost { why, code, all_gone } => Err(job::lost(&report.what(), &why, code, all_gone)),
        }
    }

    async fn supervise(
        &self,
        url: &str,
        guard: &Guard,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<End, Failure> {
        let job = Job {
            command: &self.command,
            name: &self.ask.name,
            grace: self.grace,
            max_hold: self.ask.max_hold,
            url,
            env: Vec::new(),
            pipes: None,
        };
        job.supervise(guard, signals, report).await
    }
}

/// Gives the lock back. `None`: the store did not answer; the ttl ends it.
async fn release(keeper: &Lockkeeper, guard: Guard, report: &Report) -> Option<Release> {
    let (fence, ttl) = (guard.fence(), guard.ttl());
    match guard.release().await {
        Ok(release) => {
            if release == Release::Released {
                report.event("released", json!({ "fence": fence }));
            }
            Some(release)
        }
        Err(error) => {
            report.say(&format!(
                "warning: {} could not be released ({error}); it is free in {} at the latest",
                report.what(),
                span::show(ttl)
            ));
            let _ = tokio::time::timeout(Duration::from_secs(2), keeper.settle()).await;
            None
        }
    }
}
