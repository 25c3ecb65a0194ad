//! The numbers of `--metrics FILE`: how long a job waited and held its lock, how it ended, and when it last went well.

mod numbers;
mod writer;

use std::path::PathBuf;

use lockkeeper::{BootInstant, Clock, Guard, Outcome, SystemClock};
use numbers::{JobLabels, RunEnd};
use writer::MetricsFile;

use crate::child::supervisor::CommandEnd;
use crate::exit::ExitFailure;

/// The numbers of one job, on their way to its file. Nothing here waits for a disk or fails: a thread of its own writes the file,
/// because the thread of the supervisor must end a command in time.
#[derive(Debug)]
pub struct JobMetrics {
    file: MetricsFile,
    waits_since: BootInstant,
    held_since: Option<BootInstant>,
    /// Whether the turn is counted, or will be when its command ends.
    is_counted: bool,
    was_lost: bool,
    /// The last reason for which the file was not written: the user reads it once, not with every change.
    last_failure: Option<String>,
}

fn now_seconds() -> f64 {
    SystemClock.wall().as_micros() as f64 / 1e6
}

impl JobMetrics {
    /// The numbers of the job `lock`, which the subcommand `kind` runs. The wait begins now.
    pub fn new(file: PathBuf, kind: &'static str, lock: String) -> Self {
        JobMetrics {
            file: MetricsFile::new(file, JobLabels { kind: kind.into(), lock }),
            waits_since: SystemClock.now(),
            held_since: None,
            is_counted: false,
            was_lost: false,
            last_failure: None,
        }
    }

    /// The wait begins now: a leader or a schedule waits for its next turn.
    pub fn wait_begins(&mut self) {
        (self.waits_since, self.is_counted, self.was_lost) = (SystemClock.now(), false, false);
    }

    /// The lock was granted.
    pub fn granted(&mut self, guard: &Guard) {
        let now = SystemClock.now();
        self.held_since = Some(now);
        let (waited, fence) = (now.since(self.waits_since).as_secs_f64(), guard.fence().get());
        self.file.change(move |job| (job.wait, job.fence) = (Some(waited), Some(fence as f64)));
    }

    pub fn command_started(&mut self) {
        self.is_counted = true;
        let now = now_seconds();
        self.file.change(move |job| (job.start, job.running) = (Some(now), true));
    }

    pub fn command_ended(&mut self, end: &CommandEnd) {
        let (now, run_end) = (now_seconds(), RunEnd::of(end));
        self.was_lost = run_end == RunEnd::Lost;
        let code = match end {
            CommandEnd::Itself { code, .. } => *code,
            CommandEnd::Lost { .. } => Outcome::Lost.exit_code().into(),
        };
        self.file.change(move |job| {
            (job.end, job.running, job.exit_code) = (Some(now), false, Some(f64::from(code)));
            if run_end == RunEnd::Succeeded {
                job.success = Some(now);
            }
            job.count(run_end);
        });
    }

    /// The hold ended: the lock was released, or left to expire.
    pub fn hold_ended(&mut self) {
        if let Some(since) = self.held_since.take() {
            let held = SystemClock.now().since(since).as_secs_f64();
            self.file.change(move |job| job.hold = Some(held));
        }
    }

    /// A turn of a schedule ended, or the whole call: counts it, unless its command has run and was counted.
    pub fn turn_ended(&mut self, failure: Option<&ExitFailure>) {
        let end = failure.map_or(RunEnd::NotRun, RunEnd::of_failure);
        if !self.is_counted || (end == RunEnd::Lost && !self.was_lost) {
            let waited = SystemClock.now().since(self.waits_since).as_secs_f64();
            let has_waited = !self.is_counted && end != RunEnd::NotRun && self.held_since.is_none();
            self.file.change(move |job| {
                if has_waited {
                    job.wait = Some(waited);
                }
                job.count(end);
            });
            self.is_counted = true;
        }
    }

    /// The call ended: counts it, and waits a moment for the file. Returns why the file was not written.
    pub fn finish(&mut self, result: &Result<i32, ExitFailure>) -> Option<String> {
        self.turn_ended(result.as_ref().err());
        self.hold_ended();
        let failure = self.file.flush();
        self.if_new(failure)
    }

    /// Why the file was not written, once.
    pub fn failure(&mut self) -> Option<String> {
        let failure = self.file.failure();
        self.if_new(failure)
    }

    fn if_new(&mut self, failure: Option<String>) -> Option<String> {
        let new = failure.filter(|why| self.last_failure.as_ref() != Some(why))?;
        self.last_failure = Some(new.clone());
        Some(new)
    }
}
