//! `lockkeeper status`: whether a job of `run --window` or `cron` runs as it should, for monitoring systems.

use std::time::Duration;

use clap::Args;
use lockkeeper::windows::{EndedRun, WindowRecord};
use lockkeeper::{LockName, LockView, Lockkeeper, WallTime};
use serde_json::json;

use crate::args::{CommonArgs, lock_name};
use crate::duration;
use crate::exit::ExitFailure;
use crate::output;
use crate::text::{age, ago, plain, quoted};
use crate::windows::shown;

/// Say whether a job of `run --window` or `cron` runs as it should, for monitoring.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    /// Which job
    #[arg(value_parser = lock_name())]
    pub name: LockName,
    /// Critical if the last run that went well ended longer ago than this
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_window, allow_hyphen_values = true)]
    pub max_age: Option<Duration>,
    #[command(flatten)]
    pub common: CommonArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper status nightly --max-age 26h           for Nagios, Icinga, Sensu and their relatives
  lockkeeper status nightly --json | jq .window.ended.exit_code

Exit codes: 0 it went well, 1 it failed and is being run again, 2 it failed, did not end,
is overdue or never ran, 3 the store cannot be asked; 64 bad call.";

/// The states that a monitoring system understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Ok,
    Warning,
    Critical,
    Unknown,
}

impl Health {
    fn as_str(self) -> &'static str {
        match self {
            Health::Ok => "ok",
            Health::Warning => "warning",
            Health::Critical => "critical",
            Health::Unknown => "unknown",
        }
    }
}

impl StatusArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        let (health, why, record) = match self.look(self.common.url()?.expose()).await {
            Ok(Some((record, running))) => {
                let (health, why) = evaluate(&record, running, self.max_age);
                (health, why, Some(record))
            }
            Ok(None) => (Health::Critical, "no window was ever begun".into(), None),
            Err(error) => (Health::Unknown, format!("the store cannot be asked: {error}"), None),
        };
        output::line(&match self.common.json {
            true => json!({ "name": self.name, "status": health.as_str(), "why": why, "window": record })
                .to_string(),
            false => {
                format!("{}: {}: {}", health.as_str().to_uppercase(), quoted(self.name.as_str()), plain(&why))
            }
        })?;
        Ok(health as i32)
    }

    async fn look(&self, url: &str) -> lockkeeper::Result<Option<(WindowRecord, bool)>> {
        let keeper = Lockkeeper::open(url).await?;
        keeper.windows(self.name.as_str()).check()?;
        Ok(look(&keeper, &self.name).await?.1)
    }
}

/// The lock of a job; and its record, if it has one, with whether its newest run is under way: its fence holds the lock.
pub async fn look(
    keeper: &Lockkeeper,
    name: &LockName,
) -> lockkeeper::Result<(Option<LockView>, Option<(WindowRecord, bool)>)> {
    let windows = keeper.windows(name.as_str());
    // A name may be too long for the windows of a job, or the store has no records: then there are none.
    if windows.check().is_err() {
        return Ok((keeper.inspect(name).await?, None));
    }
    let mut record = windows.record().await?;
    loop {
        let view = keeper.inspect(name).await?;
        let Some(newest) = record else { return Ok((view, None)) };
        let holds = view.as_ref().is_some_and(|view| view.held.iter().any(|held| held.fence == newest.fence));
        if newest.done || holds {
            let running = !newest.done;
            return Ok((view, Some((newest, running))));
        }
        // The run does not hold the lock. It may have ended well between the two reads: its host writes that down before it releases.
        record = windows.record().await?;
        if record.as_ref() == Some(&newest) {
            return Ok((view, Some((newest, false))));
        }
    }
}

fn of_ms(ms: u64) -> WallTime {
    WallTime::from_micros(ms.saturating_mul(1000))
}

/// How a run ended, in words.
pub fn ended(run: &EndedRun) -> String {
    let how = match run.exit_code {
        0 => "went well".to_owned(),
        code => format!("failed with {code}"),
    };
    let took = Duration::from_millis(run.ended_ms.saturating_sub(run.started_ms));
    let (window, host, took) = (shown(run.at_ms), plain(&run.host).into_owned(), duration::rough(took));
    format!("the run of {window} {how} on {host} {} ago, after {took}", ago(of_ms(run.ended_ms)))
}

/// The newest run that was begun, in words, if it has not ended.
pub fn unfinished(record: &WindowRecord, running: bool) -> Option<String> {
    let host = record.host.as_deref().unwrap_or("a host");
    let since = record.started_ms.map_or(String::new(), |ms| format!(" {} ago", ago(of_ms(ms))));
    let what = match (record.done, running) {
        (true, _) => return None,
        (false, true) => "runs",
        (false, false) => "did not end: its host died, or lost the lock. It",
    };
    let begun = format!("was begun by {}{since}", plain(host));
    Some(match running {
        true => format!("the window of {} {what}: it {begun}", shown(record.at_ms)),
        false => format!("the window of {} {what} {begun}", shown(record.at_ms)),
    })
}

fn evaluate(record: &WindowRecord, running: bool, max_age: Option<Duration>) -> (Health, String) {
    let failed = record.ended.as_ref().filter(|run| run.exit_code != 0);
    if let Some(text) = unfinished(record, running).filter(|_| !running) {
        return (Health::Critical, text);
    }
    let overdue = max_age.filter(|max| {
        // A record of an older version knows no ends: when its window begins is the best there is.
        let last = record.succeeded.as_ref().map(|run| run.ended_ms);
        let last = last.or_else(|| (record.done && record.ended.is_none()).then_some(record.at_ms));
        last.is_none_or(|ms| age(of_ms(ms)) > *max)
    });
    let last = match (&record.ended, &record.succeeded) {
        (Some(run), _) | (None, Some(run)) => ended(run),
        (None, None) => format!("the window of {} was run", shown(record.at_ms)),
    };
    match (overdue, failed, running) {
        (Some(max), ..) => {
            let max = duration::exact(max);
            (Health::Critical, format!("no run went well within {max}: {last}"))
        }
        (None, Some(_), true) => (Health::Warning, format!("{last}; it is being run again")),
        (None, Some(_), false) => (Health::Critical, last),
        (None, None, true) => (Health::Ok, unfinished(record, true).unwrap_or(last)),
        (None, None, false) => (Health::Ok, last),
    }
}
