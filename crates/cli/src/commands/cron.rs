//! `lockkeeper cron`: a command on a schedule, each time on one of many hosts.

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use lockkeeper::{Clock, Guard, LockName, Lockkeeper, Outcome, SystemClock};
use serde_json::json;

use crate::args::{JobArgs, JobMetricsArgs, LeaseArgs, NameArgs, utf8};
use crate::child::job::{self, ExpiringHold};
use crate::child::supervisor::CommandEnd;
use crate::exit::{self, ExitFailure};
use crate::job_metrics::JobMetrics;
use crate::missed_windows::MissedWindows;
use crate::report::Report;
use crate::schedule::{self, Schedule};
use crate::signals::SignalStream;
use crate::store::{self, StoreSource};
use crate::windows::{self, WindowRunner, WindowsOutcome};

/// Run a command on a schedule, each time on one of many hosts.
///
/// Start it on every host with the same name and schedule. For each time of the schedule one host runs the command, and
/// another host if that one dies, even if their clocks differ by seconds.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CronArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// The schedule: minute, hour, day, month and weekday, as in a crontab
    #[arg(long, value_name = "FIELDS", value_parser = utf8("schedule"), allow_hyphen_values = true)]
    pub every: String,
    /// The time zone of the schedule, for instance Europe/Berlin; the same on all hosts
    #[arg(long, value_name = "ZONE", default_value = "UTC", value_parser = utf8("zone"))]
    pub zone: String,
    /// Run up to N missed times first, oldest first
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub catch_up: Option<u16>,
    /// Run a failed time up to N more times, each time on the next host that waits
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub retry_failed: Option<u32>,
    #[command(flatten)]
    pub lease: LeaseArgs,
    #[command(flatten)]
    pub metrics: JobMetricsArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper cron settle --every '0 2 * * *' --zone Europe/Berlin -- ./settle.sh
  lockkeeper cron poll --every '*/5 * * * mon-fri' -- ./poll.sh
  lockkeeper cron bill --every '0 0 1 * *' --catch-up 12 -- ./bill.sh     also the missed months

The command gets LOCKKEEPER_WINDOW (the time at which it was due, in UTC), LOCKKEEPER_FENCE (the
fencing token) and the other variables of `run`. A time that does not exist, because clocks are set
forward, is due at that moment; a time that exists twice is due once. A failed run counts as a run,
unless --retry-failed is given; if a host dies during a run, another host runs it. `lockkeeper status
NAME` says how the last run ended.

Runs until a signal ends it: 128+n, whatever the command does with the signal. Other exit codes:
64 bad call, 69 the store is unreachable at the start, 78 the store has no records.";

/// How long the last release may take.
const RELEASE: Duration = Duration::from_secs(2);

pub fn now() -> Timestamp {
    let micros = i64::try_from(SystemClock.wall().as_micros()).unwrap_or(i64::MAX);
    Timestamp::from_microsecond(micros).unwrap_or(Timestamp::MAX)
}

pub fn ms(at: Timestamp) -> u64 {
    u64::try_from(at.as_millisecond()).unwrap_or(0)
}

pub fn of_ms(at: u64) -> Timestamp {
    i64::try_from(at).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok()).unwrap_or(Timestamp::MAX)
}

impl CronArgs {
    fn name(&self) -> &LockName {
        self.named.get()
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let report = self.job.report(std::iter::once(self.name()));
        let report = self.metrics.keep(report, "cron", self.name());
        report.finish(self.run_schedule(&report).await)
    }

    async fn run_schedule(&self, report: &Report) -> Result<i32, ExitFailure> {
        let schedule = self.schedule()?;
        self.job.check()?;
        let source = self.job.common.source()?;
        store::warn_of_one_host(&source, report);
        let keeper = Lockkeeper::open(source.url.expose()).await?;
        keeper.windows(self.name().as_str()).check()?;
        let mut signals = SignalStream::forwarded()?;
        let mut last = now();
        loop {
            let Some(due) = schedule.after(last) else {
                return Err(ExitFailure::new(Outcome::Invalid, "the schedule has come to its end"));
            };
            report.event("next", json!({ "window": windows::shown(ms(due)) }));
            let next_run = async {
                until(due).await;
                report.measure(JobMetrics::wait_begins);
                self.acquire(&keeper, report, due, &schedule).await
            };
            let guard = tokio::select! {
                biased;
                signal = signals.next_ending() => {
                    return Ok(signals.flush_releases(&keeper, signal).await);
                }
                guard = next_run => guard?,
            };
            if let Some(guard) = guard {
                report.measure(|job| job.granted(&guard));
                let (next, all_gone) =
                    self.run(&keeper, &source, &guard, due, &schedule, &mut signals, report).await?;
                if !all_gone {
                    let hold = ExpiringHold::of(&guard);
                    guard.let_expire();
                    hold.outlast(&keeper, &mut signals, report).await;
                } else if let AfterRun::End(_) = next {
                    let _ = signals.race(tokio::time::timeout(RELEASE, guard.release())).await;
                } else {
                    drop(guard);
                }
                report.measure(JobMetrics::hold_ended);
                match next {
                    AfterRun::End(code) => return Ok(code),
                    // This host queues behind the waiting hosts: the next one to run it is another host.
                    AfterRun::Again if schedule.after(due).is_none_or(|next| next > now()) => continue,
                    _ => {}
                }
            }
            // Times that came due meanwhile are missed; the next run reports them.
            last = due.max(schedule.between(due, now()).last().copied().unwrap_or(due));
        }
    }

    /// Parses the schedule. Fails before a store is opened.
    fn schedule(&self) -> Result<Schedule, ExitFailure> {
        Schedule::new(&self.every, schedule::zone(&self.zone)?)
            .map_err(|e| ExitFailure::new(Outcome::Invalid, format!("--every {:?}: {e}", self.every)))
    }

    /// Acquires the lock. Retries while the store is unreachable, until the next time is due; then returns `None`, and this time is
    /// missed.
    async fn acquire(
        &self,
        keeper: &Lockkeeper,
        report: &Report,
        due: Timestamp,
        schedule: &Schedule,
    ) -> Result<Option<Guard>, ExitFailure> {
        loop {
            let mut request = keeper.lock(self.name()).ttl(self.lease.ttl);
            if let Some(label) = self.job.label() {
                request = request.label(label);
            }
            if self.lease.correctness {
                request = request.for_correctness();
            }
            match request.acquire().await {
                Ok(guard) => return Ok(Some(guard)),
                Err(error) if matches!(error.outcome(), Outcome::Unavailable | Outcome::Unknown) => {
                    report.say(&format!("{error}; trying again"));
                    report.event("retry", json!({ "why": error.to_string() }));
                }
                Err(error) => return Err(error.into()),
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            if schedule.after(due).is_some_and(|next| next <= now()) {
                return Ok(None);
            }
        }
    }

    /// Runs the time `due`, and the missed times before it. Also returns whether everything is gone that the commands have started.
    #[allow(clippy::too_many_arguments, reason = "each is a separate part of one run")]
    async fn run(
        &self,
        keeper: &Lockkeeper,
        source: &StoreSource,
        guard: &Guard,
        due: Timestamp,
        schedule: &Schedule,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<(AfterRun, bool), ExitFailure> {
        let catch_up = self.catch_up.unwrap_or(0).into();
        let zone = schedule.zone_name().unwrap_or(&self.zone);
        let retries = self.retry_failed.unwrap_or(0);
        let name = self.name().as_str();
        let next_due =
            schedule.after(due).and_then(|next| Duration::try_from(next.duration_since(now())).ok());
        let give_up = next_due.map(|left| SystemClock.now() + left);
        let windows = WindowRunner { keeper, name, report, zone, catch_up, retries, give_up };
        let between = |newest: u64, at: u64| {
            let all: Vec<u64> = schedule.between(of_ms(newest), of_ms(at)).into_iter().map(ms).collect();
            MissedWindows::of(&all, catch_up)
        };
        let mut asked = None;
        let work = async |at, signals: &mut SignalStream| {
            let env = ("LOCKKEEPER_WINDOW", windows::shown(at));
            let job = self.job.job(self.name(), source, Some(env));
            let end = job.supervise(guard, signals, report).await;
            if let Ok(CommandEnd::Itself { asked: signal, .. } | CommandEnd::Lost { asked: signal, .. }) =
                &end
            {
                asked = *signal;
            }
            end
        };
        let ran = windows.run(guard, ms(due), between, signals, work).await;
        let all_gone = ran.as_ref().map_or(true, WindowsOutcome::is_all_gone);
        if !matches!(ran, Ok(WindowsOutcome::NotBegun(_))) {
            report.measure(|job| job.turn_ended(ran.as_ref().err()));
        }
        let next = match ran {
            Ok(WindowsOutcome::NotBegun(error)) => {
                report.say(&format!("{error}; trying again"));
                report.event("retry", json!({ "why": error.to_string() }));
                match signals.race(tokio::time::sleep(windows::PAUSE)).await {
                    Ok(()) => AfterRun::Again,
                    Err(signal) => AfterRun::End(exit::by_signal(signal.as_raw())),
                }
            }
            Ok(WindowsOutcome::Ended { end: CommandEnd::Itself { asked: Some(signal), .. }, .. }) => {
                AfterRun::End(exit::by_signal(signal.as_raw()))
            }
            Ok(WindowsOutcome::Ended { end: CommandEnd::Itself { code: 0, .. }, .. }) => AfterRun::Time,
            Ok(WindowsOutcome::Ended { end: CommandEnd::Itself { code, .. }, again }) => {
                report.say(&format!("{}: the command ended with {code}", report.what()));
                if again { AfterRun::Again } else { AfterRun::Time }
            }
            Ok(WindowsOutcome::Ended { end: CommandEnd::Lost { why, code, all_gone, .. }, .. }) => {
                job::lost(&report.what(), &why, code, all_gone).print(self.job.common.json);
                AfterRun::Time
            }
            // Reported, and no reason to end: the next run may succeed.
            Err(failure) => {
                failure.print(self.job.common.json);
                AfterRun::Time
            }
        };
        // A signal that was passed on to the command also ends this process, whatever the command did with it.
        let next = asked.map_or(next, |signal| AfterRun::End(exit::by_signal(signal.as_raw())));
        Ok((next, all_gone))
    }
}

/// The step after a run.
enum AfterRun {
    /// Wait for the next time of the schedule.
    Time,
    /// Run the same time again, because it failed, or could not begin.
    Again,
    /// End this process with this exit code, because of a signal.
    End(i32),
}

/// Waits until the wall clock shows `due`. In steps, because the wall clock may be set meanwhile.
async fn until(due: Timestamp) {
    loop {
        let left = Duration::try_from(due.duration_since(now())).unwrap_or_default();
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_secs(20))).await;
    }
}
