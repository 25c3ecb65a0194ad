use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use lockkeeper::{Clock, Guard, LockName, Lockkeeper, Outcome, SystemClock};
use serde_json::json;

use crate::args::{Common, Inherited, Named, utf8};
use crate::child::job::{self, Job};
use crate::child::supervise::End;
use crate::exit::{self, Failure};
use crate::report::{Events, Report};
use crate::schedule::{self, Schedule};
use crate::signals::Signals;
use crate::span;
use crate::store::{self, Address};
use crate::windows::{self, Missed, Ran, Windows};

/// Run a command on schedule, each time by one of many hosts.
///
/// A small scheduler: start it on every host with the same name and schedule. Each time that is due is run by one of them,
/// and by another if that one dies, even if their clocks differ by seconds.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Cron {
    #[command(flatten)]
    pub named: Named,
    /// When: minute, hour, day, month and weekday, as in a crontab
    #[arg(long, value_name = "FIELDS", value_parser = utf8("schedule"), allow_hyphen_values = true)]
    pub every: String,
    /// The time zone of the schedule, for instance Europe/Berlin; the same on all hosts
    #[arg(long, value_name = "ZONE", default_value = "UTC", value_parser = utf8("zone"))]
    pub zone: String,
    /// Run up to N missed times first, oldest first
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub catch_up: Option<u16>,
    /// Run a time that failed up to N times more, each time by the next host that waits
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub retry_failed: Option<u32>,
    /// How long our silence may last before another host takes over
    #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = span::ttl, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// Time between TERM and KILL if the lock is lost; at most a quarter of the ttl
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = span::up_to_a_day, allow_hyphen_values = true)]
    pub grace: Duration,
    /// Twice would be harm: refuse a store that can forget a run
    #[arg(long)]
    pub correctness: bool,
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
  lockkeeper cron settle --every '0 2 * * *' --zone Europe/Berlin -- ./settle.sh
  lockkeeper cron poll --every '*/5 * * * mon-fri' -- ./poll.sh
  lockkeeper cron bill --every '0 0 1 * *' --catch-up 12 -- ./bill.sh     also the months we were down

The command sees LOCKKEEPER_WINDOW (the time it was due, in UTC), LOCKKEEPER_FENCE and what `run`
sets. A time that does not exist, because clocks are set forward, is due at that moment; one that
exists twice is due once. A run that fails is a run, unless --retry-failed is given; a run whose host
dies is run by another. `lockkeeper status NAME` says how the last run ended.

Goes on until a signal ends it: 128+n, whatever the command makes of the signal. Other exit codes:
64 bad call, 69 store unavailable at the start, 78 the store has no records.";

/// How long a release may take when all is over.
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

impl Cron {
    fn name(&self) -> &LockName {
        self.named.get()
    }

    pub async fn go(self) -> Result<i32, Failure> {
        let schedule = self.schedule()?;
        job::check(&self.command)?;
        let report = Report::new(std::iter::once(self.name()), self.common.json, self.quiet, Events::Stderr);
        let address = self.common.address()?;
        store::warn_of_one_host(address.url.expose(), &report);
        let keeper = Lockkeeper::open(address.url.expose()).await?;
        keeper.windows(self.name().as_str()).check()?;
        let mut signals = Signals::forwarded()?;
        let mut last = now();
        loop {
            let Some(due) = schedule.after(last) else {
                return Err(Failure::new(Outcome::Invalid, "the schedule has come to its end"));
            };
            report.event("next", json!({ "window": windows::shown(ms(due)) }));
            let turn = async {
                until(due).await;
                self.acquire(&keeper, &report, due, &schedule).await
            };
            let guard = tokio::select! {
                biased;
                signal = signals.end() => {
                    return Ok(signals.leave(&keeper, signal).await);
                }
                guard = turn => guard?,
            };
            if let Some(guard) = guard {
                let next = self.run(&keeper, &address, &guard, due, &schedule, &mut signals, &report).await?;
                match next {
                    Next::End(code) => {
                        let _ = signals.or_end(tokio::time::timeout(RELEASE, guard.release())).await;
                        return Ok(code);
                    }
                    // Behind those that wait: another host may have more luck.
                    Next::Again if schedule.after(due).is_none_or(|next| next > now()) => continue,
                    _ => {}
                }
            }
            // What came due meanwhile is missed, and told by the next run.
            last = due.max(schedule.between(due, now()).last().copied().unwrap_or(due));
        }
    }

    /// What can be wrong with it is told before any store is opened.
    fn schedule(&self) -> Result<Schedule, Failure> {
        Schedule::new(&self.every, schedule::zone(&self.zone)?)
            .map_err(|e| Failure::new(Outcome::Invalid, format!("--every {:?}: {e}", self.every)))
    }

    /// The lock. A store that is away for a while is waited for, until the next time is due: then this one is missed.
    async fn acquire(
        &self,
        keeper: &Lockkeeper,
        report: &Report,
        due: Timestamp,
        schedule: &Schedule,
    ) -> Result<Option<Guard>, Failure> {
        loop {
            let mut ask = keeper.lock(self.name()).ttl(self.ttl);
            if let Some(label) = job::label(&self.command) {
                ask = ask.label(label);
            }
            if self.correctness {
                ask = ask.for_correctness();
            }
            match ask.acquire().await {
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

    /// Runs what is due.
    #[allow(clippy::too_many_arguments, reason = "all of it belongs to the one run")]
    async fn run(
        &self,
        keeper: &Lockkeeper,
        address: &Address,
        guard: &Guard,
        due: Timestamp,
        schedule: &Schedule,
        signals: &mut Signals,
        report: &Report,
    ) -> Result<Next, Failure> {
        let catch_up = self.catch_up.unwrap_or(0).into();
        let (zone, retries) = (self.zone.as_str(), self.retry_failed.unwrap_or(0));
        let windows = Windows { keeper, name: self.name().as_str(), report, zone, catch_up, retries };
        let between = |newest: u64, at: u64| {
            let all: Vec<u64> = schedule.between(of_ms(newest), of_ms(at)).into_iter().map(ms).collect();
            Missed::of(&all, catch_up)
        };
        let work = async |at, signals: &mut Signals| {
            let job = Job {
                command: &self.command,
                name: self.name(),
                grace: self.grace,
                max_hold: None,
                store: address.environment(self.inherited.hide_store),
                env: vec![("LOCKKEEPER_WINDOW", windows::shown(at))],
                pipes: None,
            };
            job.supervise(guard, signals, report).await
        };
        match windows.run(guard, ms(due), between, signals, work).await {
            // Whatever the command made of it: the signal was for us, too.
            Ok(Ran { end: End::Itself { asked: Some(signal), .. }, .. }) => {
                Ok(Next::End(exit::by_signal(signal.as_raw())))
            }
            Ok(Ran { end: End::Itself { code: 0, .. }, .. }) => Ok(Next::Time),
            Ok(Ran { end: End::Itself { code, .. }, again }) => {
                report.say(&format!("{}: the command ended with {code}", report.what()));
                Ok(if again { Next::Again } else { Next::Time })
            }
            Ok(Ran { end: End::Lost { why, code, all_gone }, .. }) => {
                job::lost(&report.what(), &why, code, all_gone).tell(self.common.json);
                Ok(Next::Time)
            }
            // Told, and not the end: the next time may go well.
            Err(failure) => {
                failure.tell(self.common.json);
                Ok(Next::Time)
            }
        }
    }
}

/// What comes after a run.
enum Next {
    /// The next time that is due.
    Time,
    /// The same time again: it failed.
    Again,
    /// A signal came that ends us, with this exit code.
    End(i32),
}

/// Waits until the wall clock says `due`. In steps, because a wall clock can be set.
async fn until(due: Timestamp) {
    loop {
        let left = Duration::try_from(due.duration_since(now())).unwrap_or_default();
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_secs(20))).await;
    }
}
