//! One run per window of time, for `run --window` and `cron`.

use std::time::Duration;

use lockkeeper::windows::{Window, WindowRecord, Windows};
use lockkeeper::{BootInstant, Clock, Error, Guard, Lockkeeper, Outcome, SystemClock};
use rustix::process::Signal;
use serde_json::json;

use crate::child::supervisor::CommandEnd;
use crate::exit::{self, ExitFailure};
use crate::missed_windows::MissedWindows;
use crate::report::Report;
use crate::signals::SignalStream;
use crate::store;
use crate::text::{plain, rfc3339};

/// The outcome if a signal arrived during a call to the store.
fn ended(signal: Signal) -> WindowsOutcome {
    WindowsOutcome::Ended {
        end: CommandEnd::Itself { code: exit::by_signal(signal.as_raw()), asked: Some(signal) },
        again: false,
    }
}

/// The begin of a window, for messages and for the command's environment.
pub fn shown(at_ms: u64) -> String {
    rfc3339(lockkeeper::WallTime::from_micros(at_ms.saturating_mul(1000)))
}

/// How the runs of the due windows ended.
#[derive(Debug)]
pub enum WindowsOutcome {
    Ended {
        end: CommandEnd,
        /// The newest window failed, and is to be run again by the next holder of the lock.
        again: bool,
    },
    /// The store was unreachable, or the lock was lost, before the first window had begun. Nothing has run.
    NotBegun(Error),
}

impl WindowsOutcome {
    /// Whether everything is gone that the command has started.
    pub fn is_all_gone(&self) -> bool {
        !matches!(self, WindowsOutcome::Ended { end: CommandEnd::Lost { all_gone: false, .. }, .. })
    }
}

/// Why a window has not begun.
enum BeginFailure {
    /// The store did not answer, or answered too late. The next request may succeed.
    Outage(Error),
    Refused(Error),
}

/// The pause before an unreachable store is asked again.
pub const PAUSE: Duration = Duration::from_secs(1);

/// The windows of one job, under its lock.
pub struct WindowRunner<'a> {
    pub keeper: &'a Lockkeeper,
    pub name: &'a str,
    pub report: &'a Report,
    /// The time zone that they are counted in.
    pub zone: &'a str,
    /// How many missed windows to run as well.
    pub catch_up: usize,
    /// How often to run a failed window again.
    pub retries: u32,
    /// Until when an outage is waited for before the first window begins; `None`: for as long as the lock is held.
    pub give_up: Option<BootInstant>,
}

impl WindowRunner<'_> {
    /// Runs the window that begins at `at_ms`, unless it has been run; before it those that were missed, if wanted. `between`
    /// gives the windows after the first and before the second. The exit code is that of the first that failed.
    pub async fn run(
        &self,
        guard: &Guard,
        at_ms: u64,
        between: impl Fn(u64, u64) -> MissedWindows,
        signals: &mut SignalStream,
        mut work: impl AsyncFnMut(u64, &mut SignalStream) -> Result<CommandEnd, ExitFailure>,
    ) -> Result<WindowsOutcome, ExitFailure> {
        let windows = self.keeper.windows(self.name).zone(self.zone).retry_failed(self.retries);
        let mut due = Vec::new();
        let newest = match signals.race(self.ask(&windows, guard, async || windows.record().await)).await {
            Ok(Ok(newest)) => newest,
            Ok(Err(BeginFailure::Outage(error))) => return Ok(WindowsOutcome::NotBegun(error)),
            Ok(Err(BeginFailure::Refused(error))) => return Err(error.into()),
            Err(signal) => return Ok(ended(signal)),
        };
        if let Some(newest) = newest.filter(|newest| newest.at_ms < at_ms) {
            let missed = between(newest.at_ms, at_ms);
            self.tell_missed(&newest, &missed);
            if self.catch_up > 0 {
                // The newest may have been begun and not finished.
                due.push(newest.at_ms);
                due.extend(&missed.newest[missed.newest.len().saturating_sub(self.catch_up)..]);
            }
        }
        due.push(at_ms);
        let (mut code, mut again, mut has_run) = (0, false, false);
        for at in due {
            // A window before the newest is run again here: no other host comes for it.
            loop {
                let begin = self.ask(&windows, guard, async || windows.begin(guard, at).await);
                let run = match signals.race(begin).await {
                    Err(signal) => return Ok(ended(signal)),
                    Ok(Ok(window)) => window,
                    Ok(Err(BeginFailure::Outage(error))) if !has_run => {
                        return Ok(WindowsOutcome::NotBegun(error));
                    }
                    Ok(Err(BeginFailure::Outage(error))) => return Err(not_begun_after_others(&error)),
                    Ok(Err(BeginFailure::Refused(error))) => return Err(error.into()),
                };
                let run = match run {
                    Window::Ours(run) => run,
                    Window::Done(newest) => {
                        if at == at_ms {
                            self.tell_done(at, &newest);
                        }
                        break;
                    }
                };
                let failures = run.failures();
                has_run = true;
                let (end, asked) = match work(at, signals).await? {
                    CommandEnd::Itself { code, asked } => (code, asked),
                    lost => return Ok(WindowsOutcome::Ended { end: lost, again: false }),
                };
                let finished = match signals.race(run.finish(guard, end)).await {
                    Err(signal) => {
                        self.report.say(&format!(
                            "warning: {}: the command ended with {end}, but a signal came before the store took that down. The next host \
                             may run the window again",
                            self.report.what()
                        ));
                        return Ok(ended(signal));
                    }
                    Ok(finished) => finished,
                };
                finished.map_err(|error| not_written_down(end, &error))?;
                self.report.event("window", json!({ "window": shown(at), "exit_code": end }));
                // After a signal no further window is run; if some are left, the exit code is that of the signal.
                if let Some(signal) = asked {
                    let code = if code == 0 { end } else { code };
                    let all_done = at == at_ms;
                    let code = if code == 0 && !all_done { exit::by_signal(signal.as_raw()) } else { code };
                    return Ok(WindowsOutcome::Ended {
                        end: CommandEnd::Itself { code, asked },
                        again: false,
                    });
                }
                let retry = end != 0 && failures < self.retries;
                if !retry || at == at_ms {
                    code = if code == 0 { end } else { code };
                    again = retry;
                    break;
                }
            }
        }
        Ok(WindowsOutcome::Ended { end: CommandEnd::Itself { code, asked: None }, again })
    }

    /// The answer of the store to a call before a run. An outage is waited for while the lock is held: no other host runs the window then.
    async fn ask<T>(
        &self,
        windows: &Windows,
        guard: &Guard,
        call: impl AsyncFn() -> lockkeeper::Result<T>,
    ) -> Result<T, BeginFailure> {
        let mut reported = false;
        loop {
            let error = match call().await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let is_over = !guard.is_held() || self.give_up.is_some_and(|end| SystemClock.now() >= end);
            match error.outcome() {
                Outcome::Lost | Outcome::Stale => return Err(BeginFailure::Outage(error)),
                Outcome::Unavailable | Outcome::Unknown => {}
                _ => return Err(BeginFailure::Refused(error)),
            }
            // A clock that is wrong is reported in the same way, and is no outage.
            if let Ok(Some(newest)) = windows.record().await
                && let Err(error) = windows.check_clocks(&newest)
            {
                return Err(BeginFailure::Refused(error));
            }
            if is_over {
                return Err(BeginFailure::Outage(error));
            }
            if !reported {
                self.report.say(&format!("{error}; asking again"));
                reported = true;
            }
            self.report.event("retry", json!({ "why": error.to_string() }));
            tokio::time::sleep(PAUSE.min(self.give_up.map_or(PAUSE, store::left))).await;
        }
    }

    fn tell_missed(&self, newest: &WindowRecord, missed: &MissedWindows) {
        let name = self.report.what();
        if !newest.done {
            let (host, window) = (newest.host.as_deref().unwrap_or("a host"), shown(newest.at_ms));
            self.report
                .event("missed", json!({ "count": 1, "first": window, "last": window, "begun_by": host }));
            let host = plain(host);
            self.report.say(&format!(
                "{name}: the window of {window} was missed: {host} began it, and did not end it"
            ));
        }
        let Some(last) = missed.newest.last() else { return };
        let (count, first, last) = (missed.count, shown(missed.first_ms), shown(*last));
        self.report.event("missed", json!({ "count": count, "first": first, "last": last }));
        let what = if count == 1 { "1 window was".into() } else { format!("{count} windows were") };
        self.report.say(&format!("{name}: {what} missed, {first} to {last}"));
    }

    fn tell_done(&self, at: u64, newest: &WindowRecord) {
        let (fence, code) = (newest.fence, newest.exit_code());
        let more = json!({
            "window": shown(at), "newest": shown(newest.at_ms), "fence": fence, "exit_code": exit::OK,
            "its_exit_code": code, "host": newest.host,
        });
        self.report.event("done", more);
        let by = newest.host.as_deref().map_or(String::new(), |host| format!(" by {}", plain(host)));
        let how =
            code.filter(|code| *code != 0).map_or(String::new(), |code| format!(", and failed with {code}"));
        self.report.say(&format!(
            "{}: the window of {} has been run already{by}, fence {fence}{how}",
            self.report.what(),
            shown(newest.at_ms)
        ));
    }
}

/// The failure of a call that has run missed windows, and whose next window could not begin. The store's own error may say that nothing was done.
fn not_begun_after_others(error: &Error) -> ExitFailure {
    let outcome = match error.outcome() {
        Outcome::Unavailable => Outcome::Unknown,
        outcome => outcome,
    };
    ExitFailure::new(outcome, format!("missed windows were run, and the next could not begin: {error}"))
        .next("call it again: a window that is done is not run again")
}

/// The failure of a run whose command has ended, but whose record does not say so.
fn not_written_down(code: i32, error: &Error) -> ExitFailure {
    match error.outcome() {
        Outcome::Stale | Outcome::Lost => ExitFailure::new(
            Outcome::Lost,
            format!("the command ended with {code}, but the window was taken over: {error}"),
        )
        .next("another host may have run it at the same time: check the result"),
        outcome => ExitFailure::new(
            outcome,
            format!("the command ended with {code}, but the store did not take that down: {error}"),
        )
        .next("the next host may run the window again: check the result"),
    }
}
