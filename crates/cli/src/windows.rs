//! One run per window of time, for `run --window` and `cron`.

use lockkeeper::{Guard, Lockkeeper, Outcome, Window};
use serde_json::json;

use crate::child::supervise::End;
use crate::exit::Failure;
use crate::report::Report;
use crate::text::rfc3339;

/// A window for people and for the environment: when it begins.
pub fn shown(at_ms: u64) -> String {
    rfc3339(lockkeeper::Wall::from_micros(at_ms.saturating_mul(1000)))
}

/// The windows of one job, under its lock.
pub struct Windows<'a> {
    pub keeper: &'a Lockkeeper,
    pub name: &'a str,
    pub report: &'a Report,
    /// How many missed windows are to be run, too.
    pub catch_up: usize,
}

impl Windows<'_> {
    /// Runs the window that begins at `at_ms`, unless it has been run; before it those that were missed, if wanted. `between`
    /// gives the windows after the first and before the second, oldest first. The exit code is that of the first that failed.
    pub async fn run(
        &self,
        guard: &Guard,
        at_ms: u64,
        between: impl Fn(u64, u64) -> Vec<u64>,
        mut work: impl AsyncFnMut(u64) -> Result<End, Failure>,
    ) -> Result<End, Failure> {
        let windows = self.keeper.windows(self.name);
        let mut due = Vec::new();
        if let Some(newest) = windows.newest_ms().await?.filter(|newest| *newest < at_ms) {
            let missed = between(newest, at_ms);
            self.tell_missed(&missed);
            if self.catch_up > 0 {
                // The newest may have been begun and not finished.
                due.push(newest);
                due.extend(&missed[missed.len().saturating_sub(self.catch_up)..]);
            }
        }
        due.push(at_ms);
        let mut code = 0;
        for at in due {
            let run = match windows.begin(guard, at).await? {
                Window::Ours(run) => run,
                Window::Done { newest_ms, fence } => {
                    if at == at_ms {
                        self.tell_done(at, newest_ms, fence);
                    }
                    continue;
                }
            };
            let end = match work(at).await? {
                End::Itself(end) => end,
                lost => return Ok(lost),
            };
            code = if code == 0 { end } else { code };
            run.finish().await.map_err(|error| {
                let said = format!("the command ended with {end}, but the window was taken over: {error}");
                Failure::new(Outcome::Lost, said)
                    .next("somebody else may have been at it at the same time: check the result")
            })?;
            self.report.event("window", json!({ "window": shown(at), "exit_code": end }));
            // Ended by a signal: whoever sent it does not want the next one.
            if end >= 128 {
                break;
            }
        }
        Ok(End::Itself(code))
    }

    fn tell_missed(&self, missed: &[u64]) {
        let (Some(first), Some(last)) = (missed.first(), missed.last()) else { return };
        let (count, name) = (missed.len(), self.report.what());
        self.report.event("missed", json!({ "count": count, "first": shown(*first), "last": shown(*last) }));
        let what = if count == 1 { "window was".into() } else { format!("{count} windows were") };
        self.report.say(&format!("{name}: {what} missed, {} to {}", shown(*first), shown(*last)));
    }

    fn tell_done(&self, at: u64, newest: u64, fence: lockkeeper::Fence) {
        let code = crate::exit::OK;
        let more = json!({ "window": shown(at), "newest": shown(newest), "fence": fence, "exit_code": code });
        self.report.event("done", more);
        self.report.say(&format!(
            "{}: the window of {} has been run already, fence {fence}",
            self.report.what(),
            shown(newest)
        ));
    }
}
