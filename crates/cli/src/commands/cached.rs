//! `lockkeeper cached`: prints the output of a command from the cache; one caller of the fleet runs the command.

use std::time::Duration;

use clap::Args;
use lockkeeper::cached::{Cached, CachedStart, CachedValue, FailedRefresh, RefreshPermit, ValueState};
use lockkeeper::{LockName, Lockkeeper, Outcome};
use serde_json::{Value, json};

use crate::args::{JobArgs, NameArgs};
use crate::child::capture::{CapturedOutput, OutputCapture};
use crate::child::job::{self, CommandJob, ExpiringHold};
use crate::child::supervisor::CommandEnd;
use crate::duration;
use crate::exit::{self, ExitFailure};
use crate::replay::{check_nested, claim_failure, print_streams};
use crate::report::Report;
use crate::signals::SignalStream;
use crate::store::{self, StoreSource};

/// The most bytes of a cached output.
const OUTPUT_MAX: usize = 64 << 20;

/// Print the output of a command from the cache; one caller runs the command when it is due.
///
/// While the output is fresh, every caller gets it at once. When it is not, one caller in the fleet runs the command. The
/// others get the old output at once (--stale), or wait for the new one.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CachedArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// How long the output is fresh, counted from the end of the command
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub ttl: Duration,
    /// How much longer the old output is printed while one caller runs the command, or after it failed [default: not at all]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub stale: Option<Duration>,
    /// Wait for the command of another caller for at most this long, then print the old output, or exit 75 [default: the old
    /// output at once; for ever if there is none]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_wait, allow_hyphen_values = true)]
    pub wait: Option<Duration>,
    /// Do not wait: print the old output, or exit 75
    #[arg(long, conflicts_with = "wait")]
    pub skip: bool,
    /// How long other callers wait for the one that runs the command, after it has stopped renewing its lease
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse_ttl, allow_hyphen_values = true)]
    pub lease: Duration,
    /// How long no caller runs the command after it failed
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub back_off: Duration,
    /// For this long a failure is the answer to all callers, if there is no output [default: they wait, and try again]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_long, allow_hyphen_values = true)]
    pub negative: Option<Duration>,
    /// How early the command runs before the output is due: the longer it takes, the earlier; 0 is never
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = beta, allow_hyphen_values = true)]
    pub beta: f64,
    /// The part of the ttl, at most, by which the ttl is shortened at random
    #[arg(long, value_name = "NUMBER", default_value = "0.1", value_parser = jitter, allow_hyphen_values = true)]
    pub jitter: f64,
    #[command(flatten)]
    pub job: JobArgs,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper cached report --ttl 5m -- ./report.sh           once in five minutes in the whole fleet
  lockkeeper cached rates --ttl 1m --stale 1h -- curl -sf https://example.com/rates
  lockkeeper cached health --ttl 10s --negative 10s -- ./probe

Only stdout is kept, up to 64 MiB, and only of a command that exits with 0. Another exit code leaves
the old output as it is: it is printed as long as --stale says, with a message on stderr. Without an
old output the exit code is the command's. The command gets LOCKKEEPER_KEY, LOCKKEEPER_FENCE (the
fencing token) and the other variables of `run`. If the process that runs the command dies, another
caller runs it when the lease is over, and a late output never replaces a newer one.

Exit codes: 0 the output was printed; else the command's own; 64 bad call, 72 the output is too
large, 75 another process runs the command, 76 the lock was lost, 78 the store has no records.";

fn beta(text: &str) -> Result<f64, String> {
    number(text, 100.0)
}

fn jitter(text: &str) -> Result<f64, String> {
    number(text, 0.5)
}

fn number(text: &str, most: f64) -> Result<f64, String> {
    let found = text.parse().ok().filter(|number| (0.0..=most).contains(number));
    found.ok_or_else(|| format!("0 to {most} are possible"))
}

impl CachedArgs {
    fn key(&self) -> &LockName {
        self.named.get()
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        self.job.check()?;
        self.named.check_key()?;
        let report = self.job.report(std::iter::once(self.key()));
        let source = self.job.common.source()?;
        let (keeper, wait) = store::open(source.url.expose(), self.wait, &report).await?;
        let mut signals = SignalStream::forwarded()?;
        match signals.race(check_nested(&keeper, &source, "cached", self.key())).await {
            Ok(nested) => nested?,
            Err(signal) => return Ok(exit::by_signal(signal.as_raw())),
        }
        let cached = self.cached(&keeper, wait);
        let start = tokio::select! {
            biased;
            start = cached.clone().claim() => start.map_err(|error| claim_failure(error, self.skip, &report))?,
            signal = signals.next_ending() => {
                return Ok(signals.flush_releases(&keeper, signal).await);
            }
        };
        match start {
            CachedStart::Value(value) => print_value(value, &mut signals, &report).await,
            CachedStart::Failed(failed) => Err(self.failed_before(&failed)),
            CachedStart::Refresh(permit) => {
                let ended = self.refresh(*permit, &keeper, &cached, &source, &mut signals, &report).await;
                signals.settle(&keeper).await;
                ended
            }
        }
    }

    fn cached(&self, keeper: &Lockkeeper, wait: Option<Duration>) -> Cached {
        let mut cached = keeper
            .cached(self.key().as_str())
            .ttl(self.ttl)
            .stale_while(self.stale.unwrap_or_default())
            .lease(self.lease)
            .back_off(self.back_off)
            .early_refresh(self.beta)
            .jitter(self.jitter);
        if let Some(negative) = self.negative {
            cached = cached.negative(negative);
        }
        match (self.skip, wait) {
            (true, _) => cached.wait(Duration::ZERO),
            (_, Some(wait)) => cached.wait(wait),
            _ => cached,
        }
    }

    async fn refresh(
        &self,
        permit: RefreshPermit,
        keeper: &Lockkeeper,
        cached: &Cached,
        source: &StoreSource,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<i32, ExitFailure> {
        report.granted(permit.guard());
        let (capture, pipes) = OutputCapture::hold_stdout_back(OUTPUT_MAX).map_err(|e| {
            ExitFailure::new(Outcome::Unavailable, format!("the operating system gives no pipe: {e}"))
        })?;
        let name = permit.guard().names().first().clone();
        let env = ("LOCKKEEPER_KEY", self.key().to_string());
        let job = CommandJob { pipes: Some(pipes), ..self.job.job(&name, source, Some(env)) };
        let (code, asked) = match job.supervise(permit.guard(), signals, report).await? {
            CommandEnd::Itself { code, asked } => (code, asked),
            CommandEnd::Lost { why, code, all_gone, .. } => {
                report.event("ended", json!({ "outcome": "lost", "fence": permit.fence() }));
                let hold = ExpiringHold::of(permit.guard());
                if all_gone {
                    drop(permit)
                } else {
                    permit.let_expire()
                }
                let answer = match cached.current().await {
                    Ok(Some(old)) => {
                        report.say(&format!("the lock on {} was lost: {why}", report.what()));
                        print_value(old, signals, report).await
                    }
                    _ => Err(job::lost(&report.what(), &why, code, all_gone)),
                };
                if !all_gone {
                    hold.outlast(keeper, signals, report).await;
                }
                return answer;
            }
        };
        let captured = capture.finish(asked, signals).await.map_err(|e| {
            ExitFailure::new(
                Outcome::Unknown,
                format!("the command ended with {code}, but {e}; nothing was kept"),
            )
        })?;
        report.event("ended", json!({ "outcome": "done", "fence": permit.fence(), "exit_code": code }));
        if let Some(signal) = captured.signal.or(asked.filter(|_| code != 0)) {
            // The command did not fail: a signal stopped this caller. The next one may run it at once.
            drop(permit);
            return Ok(if code != 0 { code } else { exit::by_signal(signal.as_raw()) });
        }
        match (code, captured.out.cut) {
            (0, false) => keep(permit, captured, signals, report).await,
            (0, true) => {
                let why = format!("the output has more than {OUTPUT_MAX} bytes: nothing was printed or kept");
                let _ = permit.fail(&failure_text(Outcome::Limited.exit_code().into(), &why)).await;
                Err(ExitFailure::new(Outcome::Limited, why)
                    .next("let the command print a file name, or less"))
            }
            _ => self.failed_now(permit, code, captured, signals, report).await,
        }
    }

    /// Prints the old output after a command that failed. Without an old one: what the command printed, and its exit code.
    async fn failed_now(
        &self,
        permit: RefreshPermit,
        code: i32,
        captured: CapturedOutput,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<i32, ExitFailure> {
        let why = format!("the command ended with {code}");
        let old = match signals.race(permit.fail(&failure_text(code, &why))).await {
            Ok(old) => old.unwrap_or_default(),
            Err(signal) => return Ok(exit::by_signal(signal.as_raw())),
        };
        match old {
            Some(old) => {
                report.say(&format!("{why}; this is the output of an earlier run, with fence {}", old.fence));
                print_value(CachedValue { refresh_error: None, ..old }, signals, report).await
            }
            None => {
                print_streams(captured.out.bytes, Vec::new(), signals).await?;
                Ok(code)
            }
        }
    }

    /// The failure of a call whose answer is the failure of another caller.
    fn failed_before(&self, failed: &FailedRefresh) -> ExitFailure {
        let (code, why) = parse_failure(&failed.error);
        let message = format!("there is no output: {why}, with fence {}", failed.fence);
        let failure = ExitFailure::new(Outcome::Unavailable, message);
        match code {
            Some(code) => failure.with_code(code),
            None => failure,
        }
    }
}

/// Stores the output, and prints it. An output that cannot be stored is printed all the same.
async fn keep(
    permit: RefreshPermit,
    captured: CapturedOutput,
    signals: &mut SignalStream,
    report: &Report,
) -> Result<i32, ExitFailure> {
    let fence = permit.fence();
    let output = captured.out.bytes;
    let kept = match signals.race(permit.finish(&output)).await {
        Ok(kept) => kept,
        Err(signal) => return Ok(exit::by_signal(signal.as_raw())),
    };
    let not_stored = kept.err().map(|error| error.to_string());
    let state = ValueState::Computed;
    print_value(CachedValue { value: output, fence, state, refresh_error: None, not_stored }, signals, report)
        .await
}

async fn print_value(
    found: CachedValue<Vec<u8>>,
    signals: &mut SignalStream,
    report: &Report,
) -> Result<i32, ExitFailure> {
    let refresh_error = found.refresh_error.as_deref().map(|error| parse_failure(error).1);
    if let Some(why) = &refresh_error {
        report.say(&format!("{why}; this is the output of an earlier run, with fence {}", found.fence));
    }
    if let Some(why) = &found.not_stored {
        report.say(&format!("the output is not in the cache: {why}"));
    }
    let state = match found.state {
        ValueState::Fresh => "fresh",
        ValueState::Stale => "stale",
        ValueState::Computed => "computed",
    };
    let bytes = found.value.len();
    report.event(
        "printed",
        json!({
            "state": state, "fence": found.fence, "bytes": bytes, "refresh_error": refresh_error, "not_stored": found.not_stored,
        }),
    );
    print_streams(found.value, Vec::new(), signals).await?;
    Ok(exit::OK)
}

/// The error of a failed command as it is stored, with the exit code for callers whose answer it is.
fn failure_text(code: i32, why: &str) -> String {
    json!({ "exit_code": code, "error": why }).to_string()
}

/// The exit code, if the error was stored by this command, and the error.
fn parse_failure(error: &str) -> (Option<i32>, String) {
    let stored: Option<Value> = serde_json::from_str(error).ok();
    let parsed = stored.as_ref().and_then(|stored| {
        let code = i32::try_from(stored["exit_code"].as_i64()?).ok()?;
        Some((Some(code), stored["error"].as_str()?.to_owned()))
    });
    parsed.unwrap_or_else(|| (None, error.to_owned()))
}
