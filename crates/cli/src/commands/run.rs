use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use lockkeeper::{Guard, Lockkeeper, Outcome, Release};
use serde_json::json;

use crate::args::{Ask, Common, Inherited, utf8};
use crate::child::job::{self, Job};
use crate::child::supervise::End;
use crate::commands::cron::{ms, now, of_ms};
use crate::exit::Failure;
use crate::report::{Events, Report, millis};
use crate::schedule::{self, Days};
use crate::signals::Signals;
use crate::store::{self, Address};
use crate::windows::{self, Missed, Ran, Windows};
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
    /// One run per window of this length across all hosts, counted from 1970; exit 0 if it has been run
    #[arg(long, value_name = "SPAN", value_parser = span::window, conflicts_with_all = ["shared", "permits"])]
    #[arg(allow_hyphen_values = true)]
    pub window: Option<Duration>,
    /// Run up to N missed windows first, oldest first
    #[arg(long, value_name = "N", requires = "window", value_parser = clap::value_parser!(u16).range(1..))]
    pub catch_up: Option<u16>,
    /// The time zone of windows of whole days, for instance Europe/Berlin; the same on all hosts [default: UTC]
    #[arg(long, value_name = "ZONE", requires = "window", value_parser = utf8("zone"))]
    pub zone: Option<String>,
    /// Run a window that failed up to N times more, each time by the next host that waits
    #[arg(long, value_name = "N", requires = "window", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub retry_failed: Option<u32>,
    /// Say nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
    #[command(flatten)]
    pub inherited: Inherited,
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
  lockkeeper run nightly --window 1d --zone Europe/Berlin -- ./settle.sh
                                                        cron on many hosts: once a day, by one of them
  lockkeeper run a --also b --wait 5s -- ./move.sh      both or none
  lockkeeper run gpu --permits 4 -- ./train.sh          at most four at a time

The command runs in its own process group and sees LOCKKEEPER_NAME, LOCKKEEPER_FENCE,
LOCKKEEPER_SEQUENCER, LOCKKEEPER_TTL_MS and, unless --hide-store is given, LOCKKEEPER_STORE or
LOCKKEEPER_STORE_FILE. Send the fence along with every write to a resource that can check it. Signals are passed on; Ctrl-C twice kills. If the lock is about to
be lost, the command and everything it started get TERM, and KILL before the deadline.

Exit codes: the command's own, 128+n for a signal; 75 busy, 76 lost, 126 and 127 if it cannot be
started, 64 bad call, 69 store unavailable, 78 the store cannot do that.";

impl Run {
    pub async fn go(self) -> Result<i32, Failure> {
        let report = Report::new(self.ask.names(), self.common.json, self.quiet, Events::Stderr);
        self.ask.check()?;
        job::check(&self.command)?;
        let days = self.days()?;
        let address = self.common.address()?;
        if self.window.is_some() {
            store::warn_of_one_host(address.url.expose(), &report);
        }
        let (keeper, wait) = store::open(address.url.expose(), self.ask.wait, &report).await?;
        if self.window.is_some() {
            keeper.windows(self.ask.name().as_str()).check()?;
        }
        // The window is the one we were started in, however long we wait for the lock.
        let at_ms = match (&days, self.window.map(millis)) {
            (Some(days), _) => days.begin(now()).map_or(0, ms),
            (None, Some(size)) => ms(now()) / size * size,
            (None, None) => 0,
        };
        if keeper.profile().store == "memory" && !self.ask.correctness {
            report.say("warning: a memory: store is private to this process. This lock keeps nobody out");
        }
        let mut signals = Signals::forwarded()?;
        let (mut failed, label) = (None, job::label(&self.command));
        loop {
            let asked =
                waiting::acquire(&keeper, &self.ask, label.clone(), wait, &report, &mut signals).await;
            let guard = match asked {
                Ok(guard) => guard,
                // Another host has the lock, or the store is unreachable: what our own run came to stands.
                Err(failure) => return failed.ok_or(failure),
            };
            report.granted(&guard);
            let ran =
                self.run_under(&keeper, &address, &guard, at_ms, days.as_ref(), &mut signals, &report).await;
            let released = release(&keeper, guard, &mut signals, &report).await;
            match ran? {
                Ran { end: End::Itself { code, .. }, again: true } if released == Some(Release::Released) => {
                    report
                        .say(&format!("{}: the window failed with {code}, and is run again", report.what()));
                    report.event("again", json!({ "exit_code": code }));
                    failed = Some(code);
                }
                Ran { end, .. } => return ended(end, released, &report),
            }
        }
    }

    /// Windows of days of a zone, if one is given. What is wrong with it is told before any store is opened.
    fn days(&self) -> Result<Option<Days>, Failure> {
        let (Some(zone), Some(window)) = (&self.zone, self.window) else { return Ok(None) };
        match Days::new(window, schedule::zone(zone)?) {
            Some(days) => Ok(Some(days)),
            None => {
                Err(Failure::new(Outcome::Invalid, "--zone is for windows of whole days, as in --window 1d")
                    .next("leave --zone out: windows of hours and minutes are the same in every zone"))
            }
        }
    }

    /// Runs it, or the windows that are due: the one that begins at `at_ms`, and those before it.
    #[allow(clippy::too_many_arguments, reason = "all of it belongs to the one run")]
    async fn run_under(
        &self,
        keeper: &Lockkeeper,
        address: &Address,
        guard: &Guard,
        at_ms: u64,
        days: Option<&Days>,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<Ran, Failure> {
        let Some(size) = self.window.map(millis) else {
            let end = self.supervise(address, guard, None, signals, report).await?;
            return Ok(Ran { end, again: false });
        };
        let (catch_up, retries) = (self.catch_up.unwrap_or(0).into(), self.retry_failed.unwrap_or(0));
        let zone = self.zone.as_deref().unwrap_or("UTC");
        let windows = Windows { keeper, name: self.ask.name().as_str(), report, zone, catch_up, retries };
        let between = |newest: u64, at: u64| match days {
            Some(days) => {
                let all: Vec<u64> = days.between(of_ms(newest), of_ms(at)).into_iter().map(ms).collect();
                Missed::of(&all, catch_up)
            }
            None => Missed::of_size(size, newest, at, catch_up),
        };
        let work =
            async |at, signals: &mut Signals| self.supervise(address, guard, Some(at), signals, report).await;
        windows.run(guard, at_ms, between, signals, work).await
    }

    async fn supervise(
        &self,
        address: &Address,
        guard: &Guard,
        window: Option<u64>,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<End, Failure> {
        let job = Job {
            command: &self.command,
            name: self.ask.name(),
            grace: self.grace,
            max_hold: self.ask.max_hold,
            store: address.environment(self.inherited.hide_store),
            env: window.map(|at| ("LOCKKEEPER_WINDOW", windows::shown(at))).into_iter().collect(),
            pipes: None,
        };
        job.supervise(guard, signals, report).await
    }
}

/// The exit code, or what is to be said.
fn ended(end: End, released: Option<Release>, report: &Report) -> Result<i32, Failure> {
    match end {
        End::Itself { code, .. } if released != Some(Release::AlreadyGone) => {
            report.event("ended", json!({ "outcome": "done", "exit_code": code }));
            Ok(code)
        }
        End::Itself { code, .. } => Err(Failure::new(
            Outcome::Lost,
            format!("the command ended with {code}, but the lock on {} was lost before that", report.what()),
        )
        .next("somebody else may have been at it at the same time: check the result")),
        End::Lost { why, code, all_gone } => Err(job::lost(&report.what(), &why, code, all_gone)),
    }
}

/// Gives the lock back. `None`: the store did not answer; the ttl ends it.
async fn release(
    keeper: &Lockkeeper,
    guard: Guard,
    signals: &mut Signals,
    report: &Report,
) -> Option<Release> {
    let (fence, ttl) = (guard.fence(), guard.ttl());
    let interrupted = |_| Err(lockkeeper::Error::Unknown("a signal came first".into()));
    match signals.or_end(guard.release()).await.unwrap_or_else(interrupted) {
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
