//! One run per window of time, for `run --window` and `cron`.

use lockkeeper::windows::{Window, WindowRecord};

use lockkeeper::{Error, Guard, Lockkeeper, Outcome};
use rustix::process::Signal;
use serde_json::json;

use crate::child::supervisor::CommandEnd;
use crate::exit::{self, ExitFailure};
use crate::report::Report;
use crate::signals::SignalStream;
use crate::text::{plain, rfc3339};

/// The outcome if a signal arrived during a call to the store.
fn ended(signal: Signal) -> WindowsOutcome {
    WindowsOutcome {
        end: CommandEnd::Itself { code: exit::by_signal(signal.as_raw()), asked: Some(signal) },
        again: false,
    }
}

/// The begin of a window, for messages and for the command's environment.
pub fn shown(at_ms: u64) -> String {
    rfc3339(lockkeeper::WallTime::from_micros(at_ms.saturating_mul(1000)))
}

/// The windows between two others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissedWindows {
    /// Their number, which may be huge.
    pub count: u64,
    /// When the first of them begins.
    pub first_ms: u64,
    /// The newest of them, as many as are to be run, the oldest first.
    pub newest: Vec<u64>,
}

impl MissedWindows {
    /// Of windows that are all known: `most` are to be run.
    pub fn of(all: &[u64], most: usize) -> MissedWindows {
        let newest = all[all.len().saturating_sub(most.max(1))..].to_vec();
        MissedWindows { count: all.len() as u64, first_ms: all.first().copied().unwrap_or_default(), newest }
    }

    /// Of windows of one size: those after `newest` and before `at`. They are counted, and not made: a window of a second
    /// after a run in 1970 has 1.7 billion before it.
    pub fn of_size(size: u64, newest: u64, at: u64, most: usize) -> MissedWindows {
        let count = at.saturating_sub(newest).div_ceil(size).saturating_sub(1);
        let listed = count.min(most.max(1) as u64);
        MissedWindows {
            count,
            first_ms: at.saturating_sub(count.saturating_mul(size)),
            newest: (1..=listed).rev().map(|n| at - n * size).collect(),
        }
    }
}

/// How the runs of the due windows ended.
#[derive(Debug)]
pub struct WindowsOutcome {
    pub end: CommandEnd,
    /// The newest window failed, and is to be run again by the next holder of the lock.
    pub again: bool,
}

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
        let newest = match signals.race(windows.record()).await {
            Ok(newest) => newest?,
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
        let (mut code, mut again) = (0, false);
        for at in due {
            // A window before the newest is run again here: no other host comes for it.
            loop {
                let run = match signals.race(windows.begin(guard, at)).await {
                    Err(signal) => return Ok(ended(signal)),
                    Ok(window) => window?,
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
                let (end, asked) = match work(at, signals).await? {
                    CommandEnd::Itself { code, asked } => (code, asked),
                    lost => return Ok(WindowsOutcome { end: lost, again: false }),
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
                    return Ok(WindowsOutcome { end: CommandEnd::Itself { code, asked }, again: false });
                }
                let retry = end != 0 && failures < self.retries;
                if !retry || at == at_ms {
                    code = if code == 0 { end } else { code };
                    again = retry;
                    break;
                }
            }
        }
        Ok(WindowsOutcome { end: CommandEnd::Itself { code, asked: None }, again })
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
            format!(
                "the command ended with {code}, but the store did not take that down before the lease ended: {error}"
            ),
        )
        .next("the next host may run the window again: check the result"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_counted_and_not_made() {
        let after_1970 = MissedWindows::of_size(1000, 0, 1_700_000_000_000, 2);
        assert_eq!(after_1970.count, 1_699_999_999);
        assert_eq!(
            (after_1970.first_ms, after_1970.newest),
            (1000, vec![1_699_999_998_000, 1_699_999_999_000])
        );
        assert_eq!(
            MissedWindows::of_size(1000, 5000, 6000, 9),
            MissedWindows { count: 0, first_ms: 6000, newest: vec![] }
        );
        // A newest window that is not one of this size: the size was changed.
        let changed = MissedWindows::of_size(1000, 5500, 8000, 9);
        assert_eq!((changed.count, changed.newest), (2, vec![6000, 7000]));
    }
}
