//! `lockkeeper limit`: takes tokens of a rate limit that all processes share, and runs a command with them.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use clap::Args;
use lockkeeper::limit::{LimitStatus, RateLimit};
use lockkeeper::{LockName, Outcome};
use lockkeeper_core::limit::{BucketSpec, LimitBucket, LimitOperation, LimitRequest, Rate};
use serde_json::json;

use crate::args::{CommonArgs, NameArgs};
use crate::child::job;
use crate::duration;
use crate::exit::{self, ExitFailure, OK};
use crate::output;
use crate::report::{EventOutput, Report, millis};
use crate::signals::{self, SignalStream};
use crate::store::{self, HIDDEN};
use crate::text::plain;

/// Take tokens of a rate limit that all processes share, and run a command with them.
///
/// A bucket holds up to --burst tokens and refills at --rate. If it has the tokens, the command runs, in place of this process; if not, nothing runs
/// and the exit code is 72. Every caller must use the same rate and burst for a key.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct LimitArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// How fast the bucket refills: N/s, N/min, N/h, N/d, or N per a duration, as in 5/10s
    #[arg(long, value_name = "N/UNIT", value_parser = parse_rate, allow_hyphen_values = true)]
    pub rate: Rate,
    /// How many tokens the full bucket holds [default: N of the rate]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub burst: Option<u64>,
    /// How many tokens to take: all of them or none
    #[arg(long, value_name = "N", default_value_t = 1, allow_hyphen_values = true)]
    pub take: u64,
    /// Wait for the tokens, and for an unreachable store, for at most this long; if the tokens come later, exit 72 at once
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub wait: Option<Duration>,
    /// Take nothing; print the state, and exit 72 if no token is left
    #[arg(long, conflicts_with_all = ["take", "wait", "reset", "command"])]
    pub peek: bool,
    /// Fill the bucket
    #[arg(long, conflicts_with_all = ["take", "wait", "command"])]
    pub reset: bool,
    /// Do not pass the store on to the command: neither LOCKKEEPER_STORE nor LOCKKEEPER_STORE_FILE
    #[arg(long)]
    pub hide_store: bool,
    #[command(flatten)]
    pub common: CommonArgs,
    /// The command and its arguments
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper limit mail --rate 100/s --burst 200 -- ./send.sh       run it, or exit 72
  lockkeeper limit api --rate 10/min --wait 30s -- curl URL         take a turn within 30 s
  lockkeeper limit api --rate 10/min --take 3 --json                take three, print the state
  lockkeeper limit api --rate 10/min --peek                         print the state, take nothing

Exit codes: the command's own; 72 the limit is used up, 64 bad call, 69 the store is unreachable,
74 the tokens may have been taken, 78 the store has no rate limits.";

/// Parses `100/s`.
fn parse_rate(text: &str) -> Result<Rate, String> {
    let Some((count, unit)) = text.split_once('/') else {
        return Err("a rate is tokens per time: write 100/s, 10/min, 5/h or 1/d".into());
    };
    let count: u64 =
        count.trim().parse().map_err(|_| format!("{:?} is no number of tokens", count.trim()))?;
    let seconds = match unit.trim() {
        "s" | "sec" | "second" => 1,
        "m" | "min" | "minute" => 60,
        "h" | "hour" => 60 * 60,
        "d" | "day" => 24 * 60 * 60,
        other if other.starts_with(|c: char| c.is_ascii_digit()) => {
            let period = duration::parse_window(other).map_err(|why| format!("the time of a rate: {why}"))?;
            return Rate::new(count, period).map_err(|why| why.to_string());
        }
        other => return Err(format!("{other:?} is no unit of time: write 100/s, 10/min, 5/h or 1/d")),
    };
    Rate::new(count, Duration::from_secs(seconds)).map_err(|why| why.to_string())
}

impl LimitArgs {
    pub fn key(&self) -> &LockName {
        self.named.get()
    }

    fn burst(&self) -> u64 {
        self.burst.unwrap_or(self.rate.tokens())
    }

    /// Checks everything that needs no store, before a store is opened and written to.
    fn check(&self) -> Result<(), ExitFailure> {
        let spec = BucketSpec::new(self.key().clone(), self.rate, self.burst())?;
        let operation = LimitOperation::Take { wait: Duration::ZERO };
        LimitRequest { operation, buckets: vec![LimitBucket { spec, tokens: self.take, taken: 0 }] }
            .check()?;
        self.named.check_key()?;
        if self.command.is_empty() { Ok(()) } else { job::check(&self.command) }
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        self.check()?;
        let report = Report::new(std::iter::once(self.key()), self.common.json, false, EventOutput::Stderr);
        let (keeper, wait) = store::open(self.common.url()?.expose(), self.wait, &report).await?;
        let mut signals = SignalStream::ending()?;
        let limit = keeper
            .limit(self.key().as_str())
            .rate(self.rate.tokens(), self.rate.period())
            .burst(self.burst());
        let answer = tokio::select! {
            biased;
            answer = self.ask(&limit, wait) => answer?,
            // The place of a wait that ends here is given back.
            signal = signals.next_ending() => return Ok(signals.flush_releases(&keeper, signal).await),
        };
        // Close the store before another program takes the place of this one.
        drop((limit, keeper));
        if !answer.allowed {
            return self.refused(&answer);
        }
        if self.command.is_empty() {
            self.print(&answer)?;
            return Ok(OK);
        }
        Err(self.become_command())
    }

    /// The answer of the store. `wait`: the rest of the wait.
    async fn ask(&self, limit: &RateLimit, wait: Option<Duration>) -> lockkeeper::Result<LimitStatus> {
        if self.reset {
            limit.reset().await?;
        }
        if self.peek || self.reset {
            return limit.peek().await;
        }
        let taken = match wait {
            Some(wait) => limit.wait_for(self.take, wait).await?,
            None => limit.take(self.take).await?,
        };
        Ok(taken.statuses().remove(0))
    }

    fn refused(&self, status: &LimitStatus) -> Result<i32, ExitFailure> {
        let code = Outcome::Limited.exit_code().into();
        if self.common.json || self.peek {
            self.print(status)?;
            return Ok(code);
        }
        let message = format!(
            "the rate of {} is used up: retry in {:.3} s",
            self.key(),
            status.retry_after.as_secs_f64()
        );
        Err(ExitFailure::new(Outcome::Limited, message)
            .next("take fewer tokens, or wait for them with --wait DURATION"))
    }

    fn print(&self, status: &LimitStatus) -> Result<(), ExitFailure> {
        let (retry, reset) = (status.retry_after, status.reset_after);
        if self.common.json {
            return output::line(
                &json!({
                    "key": self.key(), "allowed": status.allowed, "remaining": status.remaining, "burst": status.burst,
                    "retry_after_ms": round_up(retry), "reset_after_ms": round_up(reset),
                })
                .to_string(),
            );
        }
        output::line(&format!(
            "{}  {} of {} left, full in {:.3} s",
            plain(self.key().as_str()),
            status.remaining,
            status.burst,
            reset.as_secs_f64()
        ))
    }

    /// Runs the command in place of this process: nothing is left to do here.
    fn become_command(&self) -> ExitFailure {
        signals::unblock_for_command();
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        if self.hide_store {
            HIDDEN.iter().for_each(|(name, _)| _ = command.env_remove(name));
        }
        let error = command.exec();
        let message = format!("{} cannot be started: {error}", plain(&self.command[0].to_string_lossy()));
        ExitFailure::new(Outcome::Unavailable, message).with_code(exit::CANNOT_START)
    }
}

/// Whole milliseconds, so that a caller that waits for them does not come too early.
fn round_up(time: Duration) -> u64 {
    millis(time + Duration::from_nanos(999_999))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_parsed_with_their_unit() {
        let rate = |text| parse_rate(text).map(|rate| (rate.tokens(), rate.period().as_secs()));
        assert_eq!(rate("100/s"), Ok((100, 1)));
        assert_eq!(rate("10/min"), Ok((10, 60)));
        assert_eq!(rate("3/h"), Ok((3, 3600)));
        assert_eq!(rate("1/d"), Ok((1, 86_400)));
        assert_eq!(rate("5/10s"), Ok((5, 10)));
        for bad in [
            "",
            "100",
            "/s",
            "0/s",
            "-1/s",
            "1.5/s",
            "1/",
            "1/fortnight",
            "1/0s",
            "9999999/s",
            "99999999999999999999/s",
        ] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }
}
