//! `lockkeeper run`: a command under a lock, also once per window of time.

use std::pin::pin;
use std::time::Duration;

use clap::Args;
use lockkeeper::{BootInstant, Clock, Guard, Lockkeeper, Outcome, ReleaseOutcome, SystemClock};
use serde_json::json;

use crate::args::{JobArgs, JobMetricsArgs, LockArgs, utf8};
use crate::child::job::{self, CommandJob, ExpiringHold};
use crate::child::supervisor::CommandEnd;
use crate::child::watchdog::Watchdog;
use crate::commands::cron::{ms, now, of_ms};
use crate::exit::ExitFailure;
use crate::job_metrics::JobMetrics;
use crate::missed_windows::MissedWindows;
use crate::report::{Report, millis};
use crate::schedule::{self, DayWindows};
use crate::signals::SignalStream;
use crate::store::{self, StoreSource};
use crate::windows::{self, WindowRunner, WindowsOutcome};
use crate::{acquire, duration};

/// Run a command under a lock, and exit with its exit code.
///
/// Waits for the lock, then runs the command in its own process group. If the lock is about to be lost, the command and all
/// processes that it started get TERM, and KILL before the deadline.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    #[command(flatten)]
    pub request: LockArgs,
    /// One run per window of this length across all hosts, counted from 1970; exit 0 if another run was there
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_window, conflicts_with_all = ["shared", "permits"])]
    #[arg(allow_hyphen_values = true)]
    pub window: Option<Duration>,
    /// Run up to N missed windows first, oldest first
    #[arg(long, value_name = "N", requires = "window", value_parser = clap::value_parser!(u16).range(1..))]
    pub catch_up: Option<u16>,
    /// The time zone of windows of whole days, for instance Europe/Berlin; the same on all hosts [default: UTC]
    #[arg(long, value_name = "ZONE", requires = "window", value_parser = utf8("zone"))]
    pub zone: Option<String>,
    /// Run a failed window up to N more times, each time on the next host that waits
    #[arg(long, value_name = "N", requires = "window", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub retry_failed: Option<u32>,
    #[command(flatten)]
    pub metrics: JobMetricsArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

/// How long a watchdog that was started early waits for a grant.
const EARLY: Duration = Duration::from_millis(200);

const EXAMPLES: &str = "\
Examples:
  lockkeeper run nightly -- ./settle.sh                 wait for the lock, for ever
  lockkeeper run nightly --skip -- ./settle.sh          exit 75 if another process holds the lock
  lockkeeper run nightly --window 1d --zone Europe/Berlin -- ./settle.sh
                                                        cron on many hosts: once a day, on one of them
  lockkeeper run a --also b --wait 5s -- ./move.sh      both locks or none
  lockkeeper run gpu --permits 4 -- ./train.sh          at most four at a time

The command runs in its own process group and gets LOCKKEEPER_NAME, LOCKKEEPER_FENCE (the fencing
token), LOCKKEEPER_SEQUENCER, LOCKKEEPER_TTL_MS and, unless --hide-store is given, LOCKKEEPER_STORE or
LOCKKEEPER_STORE_FILE in its environment. Send the fence with every write to a resource that checks
it. Signals are passed on to the command; Ctrl-C twice kills it. If the lock is about to be lost, the
command and all processes that it started get TERM, and KILL before the deadline.

Exit codes: the command's own, 128+n for a signal; 75 the lock is busy, 76 the lock was lost, 126 and
127 the command cannot be started, 64 bad call, 69 the store is unreachable, 78 the store does not
support this.";

impl RunArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let report = self.job.report(self.request.names());
        let report = self.metrics.keep(report, "run", self.request.name());
        report.finish(self.run(&report).await)
    }

    async fn run(&self, report: &Report) -> Result<i32, ExitFailure> {
        self.request.check()?;
        self.job.check()?;
        let days = self.days()?;
        let source = self.job.common.source()?;
        if self.window.is_some() {
            store::warn_of_one_host(&source, report);
        }
        // A program start beside the requests to the store. Not where most calls run nothing.
        let is_likely_to_run = self.window.is_none() && !self.request.skip;
        let mut early = is_likely_to_run.then(Watchdog::start_early).and_then(Result::ok);
        let (keeper, mut wait) = store::open(source.url.expose(), self.request.wait, report).await?;
        if self.window.is_some() {
            keeper.windows(self.request.name().as_str()).check()?;
        }
        // The window is that of the start of this process, however long it waits for the lock.
        let at_ms = match (&days, self.window.map(millis)) {
            (Some(days), _) => days.begin(now()).map_or(0, ms),
            (None, Some(size)) => ms(now()) / size * size,
            (None, None) => 0,
        };
        if keeper.profile().store == "memory" && !self.request.lease.correctness {
            report.say(
                "warning: a memory: store is private to this process. This lock excludes no other process",
            );
        }
        let mut signals = SignalStream::forwarded()?;
        let (mut failed, mut is_repeated, label) = (None, false, self.job.label());
        loop {
            let began = SystemClock.now();
            let asked = {
                let request = &self.request;
                let mut acquire = pin!(acquire::acquire_lock(
                    &keeper,
                    request,
                    label.clone(),
                    wait,
                    is_repeated,
                    report,
                    &mut signals
                ));
                tokio::select! {
                    biased;
                    asked = &mut acquire => asked,
                    // A long wait needs no second process.
                    () = tokio::time::sleep(EARLY) => {
                        drop(early.take());
                        acquire.await
                    }
                }
            };
            let guard = match asked {
                Ok(guard) => guard,
                // Another host holds the lock, or the store is unreachable: the exit code of this host's run counts.
                Err(failure) => return failed.ok_or(failure),
            };
            report.granted(&guard);
            let end_of_wait = wait.map(|wait| began + wait);
            // A later request waits for what is left: the time in which the command runs does not count.
            wait = end_of_wait.map(store::left);
            let ran = self
                .run_under(
                    &keeper,
                    &source,
                    &guard,
                    at_ms,
                    days.as_ref(),
                    end_of_wait,
                    early.take(),
                    &mut signals,
                    report,
                )
                .await;
            let released = match &ran {
                Ok(ran) if !ran.is_all_gone() => {
                    let hold = ExpiringHold::of(&guard);
                    guard.let_expire();
                    hold.outlast(&keeper, &mut signals, report).await;
                    None
                }
                _ => release(&keeper, guard, &mut signals, report).await,
            };
            report.measure(JobMetrics::hold_ended);
            match ran? {
                WindowsOutcome::NotBegun(error) => {
                    let is_over = end_of_wait.is_some_and(|end| SystemClock.now() >= end);
                    if self.request.skip || is_over {
                        return failed.ok_or(error.into());
                    }
                    report.say(&format!("{error}; asking for the lock again"));
                    report.event("retry", json!({ "why": error.to_string() }));
                    if let Err(signal) = signals.race(tokio::time::sleep(windows::PAUSE)).await {
                        return Ok(signals.flush_releases(&keeper, signal).await);
                    }
                    wait = end_of_wait.map(store::left);
                    is_repeated = true;
                }
                WindowsOutcome::Ended { end: CommandEnd::Itself { code, .. }, again: true }
                    if released == Some(ReleaseOutcome::Released) =>
                {
                    report
                        .say(&format!("{}: the window failed with {code}, and is run again", report.what()));
                    report.event("again", json!({ "exit_code": code }));
                    failed = Some(code);
                    report.measure(JobMetrics::wait_begins);
                }
                WindowsOutcome::Ended { end, .. } => return ended(end, released, report),
            }
        }
    }

    /// The windows of whole days in `--zone`, if it is given. Fails before a store is opened.
    fn days(&self) -> Result<Option<DayWindows>, ExitFailure> {
        let (Some(zone), Some(window)) = (&self.zone, self.window) else { return Ok(None) };
        match DayWindows::new(window, schedule::zone(zone)?) {
            Some(days) => Ok(Some(days)),
            None => Err(ExitFailure::new(
                Outcome::Invalid,
                "--zone is for windows of whole days, as in --window 1d",
            )
            .next("leave --zone out: windows of hours and minutes are the same in every zone")),
        }
    }

    /// Runs the command, or each window that is due: the one that begins at `at_ms`, and those before it.
    #[allow(clippy::too_many_arguments, reason = "each is a separate part of one run")]
    async fn run_under(
        &self,
        keeper: &Lockkeeper,
        source: &StoreSource,
        guard: &Guard,
        at_ms: u64,
        days: Option<&DayWindows>,
        end_of_wait: Option<BootInstant>,
        watchdog: Option<Watchdog>,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<WindowsOutcome, ExitFailure> {
        let Some(size) = self.window.map(millis) else {
            let end = self.supervise(source, guard, None, watchdog, signals, report).await?;
            return Ok(WindowsOutcome::Ended { end, again: false });
        };
        let (catch_up, retries) = (self.catch_up.unwrap_or(0).into(), self.retry_failed.unwrap_or(0));
        let zone = days.and_then(DayWindows::zone_name).or(self.zone.as_deref()).unwrap_or("UTC");
        let (name, give_up) =
            (self.request.name().as_str(), end_of_wait.or(self.request.skip.then(|| SystemClock.now())));
        let windows = WindowRunner { keeper, name, report, zone, catch_up, retries, give_up };
        let between = |newest: u64, at: u64| match days {
            Some(days) => {
                let all: Vec<u64> = days.between(of_ms(newest), of_ms(at)).into_iter().map(ms).collect();
                MissedWindows::of(&all, catch_up)
            }
            None => MissedWindows::of_size(size, newest, at, catch_up),
        };
        let work = async |at, signals: &mut SignalStream| {
            self.supervise(source, guard, Some(at), None, signals, report).await
        };
        windows.run(guard, at_ms, between, signals, work).await
    }

    async fn supervise(
        &self,
        source: &StoreSource,
        guard: &Guard,
        window: Option<u64>,
        watchdog: Option<Watchdog>,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<CommandEnd, ExitFailure> {
        let env = window.map(|at| ("LOCKKEEPER_WINDOW", windows::shown(at)));
        let job = self.job.job(self.request.name(), source, env);
        let job = CommandJob { max_hold: self.request.max_hold, watchdog, ..job };
        job.supervise(guard, signals, report).await
    }
}

/// The exit code of the whole call, or its failure.
fn ended(end: CommandEnd, released: Option<ReleaseOutcome>, report: &Report) -> Result<i32, ExitFailure> {
    match end {
        CommandEnd::Itself { code, .. } if released != Some(ReleaseOutcome::AlreadyGone) => {
            report.event("ended", json!({ "outcome": "done", "exit_code": code }));
            Ok(code)
        }
        CommandEnd::Itself { code, .. } => Err(ExitFailure::new(
            Outcome::Lost,
            format!("the command ended with {code}, but the lock on {} was lost before that", report.what()),
        )
        .next("another process may have done the work at the same time: check the result")),
        CommandEnd::Lost { why, code, all_gone, .. } => Err(job::lost(&report.what(), &why, code, all_gone)),
    }
}

/// Releases the lock. `None`: the store did not confirm it, and the lock ends with its ttl.
async fn release(
    keeper: &Lockkeeper,
    guard: Guard,
    signals: &mut SignalStream,
    report: &Report,
) -> Option<ReleaseOutcome> {
    let (fence, ttl) = (guard.fence(), guard.ttl());
    let interrupted = |_| Err(lockkeeper::Error::Unknown("a signal came first".into()));
    match signals.race(guard.release()).await.unwrap_or_else(interrupted) {
        Ok(release) => {
            if release == ReleaseOutcome::Released {
                report.event("released", json!({ "fence": fence }));
            }
            Some(release)
        }
        Err(error) => {
            report.say(&format!(
                "warning: {} could not be released ({error}); it is free in {} at the latest",
                report.what(),
                duration::exact(ttl)
            ));
            let _ = tokio::time::timeout(Duration::from_secs(2), keeper.settle()).await;
            None
        }
    }
}
