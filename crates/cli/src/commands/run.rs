use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use lockkeeper::{Clock, Guard, Lockkeeper, Outcome, Release, SystemClock};
use serde_json::json;

use crate::args::{Ask, Common};
use crate::child::job::{self, Job};
use crate::child::supervise::End;
use crate::exit::Failure;
use crate::report::{Events, Report, millis};
use crate::signals::Signals;
use crate::windows::{self, Windows};
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
    /// One run per window of this length across all hosts, counted from 1970 in UTC; exit 0 if it has been run
    #[arg(long, value_name = "SPAN", value_parser = span::window, conflicts_with_all = ["shared", "permits"])]
    #[arg(allow_hyphen_values = true)]
    pub window: Option<Duration>,
    /// Run up to N missed windows first, oldest first
    #[arg(long, value_name = "N", requires = "window", value_parser = clap::value_parser!(u16).range(1..))]
    pub catch_up: Option<u16>,
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
  lockkeeper run nightly --window 1d -- ./settle.sh     cron on many hosts: once a day, by one of them
  lockkeeper run a --also b --wait 5s -- ./move.sh      both or none
  lockkeeper run gpu --permits 4 -- ./train.sh          at most four at a time

The command runs in its own process group and sees LOCKKEEPER_NAME, LOCKKEEPER_FENCE,
LOCKKEEPER_SEQUENCER, LOCKKEEPER_STORE and LOCKKEEPER_TTL_MS. Send the fence along with every write
to a resource that can check it. Signals are passed on; Ctrl-C twice kills. If the lock is about to
be lost, the command and everything it started get TERM, and KILL before the deadline.

Exit codes: the command's own, 128+n for a signal; 75 busy, 76 lost, 126 and 127 if it cannot be
started, 64 bad call, 69 store unavailable, 78 the store cannot do that.";

impl Run {
    pub async fn go(self) -> Result<i32, Failure> {
        let report = Report::new(self.ask.names(), self.common.json, self.quiet, Events::Stderr);
        self.ask.check()?;
        job::check(&self.command)?;
        let url = self.common.url()?;
        let keeper = Lockkeeper::open(&url).await?;
        if self.window.is_some() {
            keeper.windows(self.ask.name.as_str()).check()?;
        }
        // The window is the one we were started in, however long we wait for the lock.
        let started_ms = SystemClock.wall().as_micros() / 1000;
        if keeper.profile().store == "memory" && !self.ask.correctness {
            report.say("warning: a memory: store is private to this process. This lock keeps nobody out");
        }
        let mut signals = Signals::forwarded()?;
        let guard =
            waiting::acquire(&keeper, &self.ask, job::label(&self.command), &report, &mut signals).await?;
        report.granted(&guard);
        let end = self.run_under(&keeper, &url, &guard, started_ms, &mut signals, &report).await;
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

    /// Runs it, or the windows that are due.
    async fn run_under(
        &self,
        keeper: &Lockkeeper,
        url: &str,
        guard: &Guard,
        started_ms: u64,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<End, Failure> {
        let Some(size) = self.window.map(millis) else {
            return self.supervise(url, guard, None, signals, report).await;
        };
        let catch_up = self.catch_up.unwrap_or(0).into();
        let windows = Windows { keeper, name: self.ask.name.as_str(), report, catch_up };
        let between =
            |newest: u64, at: u64| (1..(at - newest).div_ceil(size)).map(|n| at - n * size).rev().collect();
        let work = async |at| self.supervise(url, guard, Some(at), signals, report).await;
        windows.run(guard, started_ms / size * size, between, work).await
    }

    async fn supervise(
        &self,
        url: &str,
        guard: &Guard,
        window: Option<u64>,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<End, Failure> {
        let job = Job {
            command: &self.command,
            name: &self.ask.name,
            grace: self.grace,
            max_hold: self.ask.max_hold,
            url,
            env: window.map(|at| ("LOCKKEEPER_WINDOW", windows::shown(at))).into_iter().collect(),
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
