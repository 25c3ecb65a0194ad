//! The numbers in the file of one job: what is in it, how it is written, and how it is read again.

use lockkeeper::Outcome;

use crate::child::supervisor::CommandEnd;
use crate::exit::ExitFailure;
use crate::exposition::{Exposition, escaped};

/// How a call ended. The words are values of the label `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// The command ended with 0.
    Succeeded,
    /// The command ended with another code.
    Failed,
    /// The lock was lost, and the command was ended.
    Lost,
    /// Another process held the lock.
    Busy,
    /// There was nothing to run: another host had run it, or a signal ended the wait.
    NotRun,
    /// The store was unreachable, or did not take the end down.
    StoreFailed,
    /// The call was refused, or its command could not be started.
    Refused,
}

const ENDS: [(RunEnd, &str); 7] = [
    (RunEnd::Succeeded, "succeeded"),
    (RunEnd::Failed, "failed"),
    (RunEnd::Lost, "lost"),
    (RunEnd::Busy, "busy"),
    (RunEnd::NotRun, "not_run"),
    (RunEnd::StoreFailed, "store_failed"),
    (RunEnd::Refused, "refused"),
];

impl RunEnd {
    pub fn of(end: &CommandEnd) -> Self {
        match end {
            CommandEnd::Itself { code: 0, .. } => RunEnd::Succeeded,
            CommandEnd::Itself { .. } => RunEnd::Failed,
            CommandEnd::Lost { .. } => RunEnd::Lost,
        }
    }

    /// The end of a call that failed, as its exit code says it.
    pub fn of_failure(failure: &ExitFailure) -> Self {
        let code = |outcome: Outcome| i32::from(outcome.exit_code());
        match failure.code {
            busy if busy == code(Outcome::Busy) => RunEnd::Busy,
            lost if lost == code(Outcome::Lost) || lost == code(Outcome::Stale) => RunEnd::Lost,
            down if down == code(Outcome::Unavailable) || down == code(Outcome::Unknown) => {
                RunEnd::StoreFailed
            }
            signal if signal > 128 => RunEnd::NotRun,
            _ => RunEnd::Refused,
        }
    }
}

/// The labels of all series of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobLabels {
    pub kind: String,
    pub lock: String,
}

/// The numbers of one job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobNumbers {
    pub wait: Option<f64>,
    pub hold: Option<f64>,
    pub exit_code: Option<f64>,
    pub start: Option<f64>,
    pub end: Option<f64>,
    pub success: Option<f64>,
    pub fence: Option<f64>,
    pub running: bool,
    outcome: Option<usize>,
    runs: [f64; ENDS.len()],
    losses: f64,
}

const RUNNING: &str = "lockkeeper_job_running";
const OUTCOME: &str = "lockkeeper_job_last_outcome";
const RUNS: &str = "lockkeeper_job_calls_total";
const LOSSES: &str = "lockkeeper_job_losses_total";

/// The gauges that are missing before their first value.
const GAUGES: [(&str, &str); 7] = [
    ("lockkeeper_job_wait_seconds", "Time that the last call waited for the lock."),
    ("lockkeeper_job_hold_seconds", "Time for which the lock was held last."),
    ("lockkeeper_job_exit_code", "Exit code of the last command; 76 if its lock was lost."),
    ("lockkeeper_job_last_start_timestamp_seconds", "When the command was last started."),
    ("lockkeeper_job_last_end_timestamp_seconds", "When the command last ended."),
    ("lockkeeper_job_last_success_timestamp_seconds", "When the command last ended with 0."),
    ("lockkeeper_job_fence", "Fence of the last grant."),
];

impl JobNumbers {
    pub fn count(&mut self, end: RunEnd) {
        let place = ENDS.iter().position(|(known, _)| *known == end);
        self.outcome = place;
        self.runs[place.unwrap_or_default()] += 1.0;
        if end == RunEnd::Lost {
            self.losses += 1.0;
        }
    }

    fn gauges(&mut self) -> [&mut Option<f64>; GAUGES.len()] {
        [
            &mut self.wait,
            &mut self.hold,
            &mut self.exit_code,
            &mut self.start,
            &mut self.end,
            &mut self.success,
            &mut self.fence,
        ]
    }

    /// The text of the file.
    pub fn render(mut self, labels: &JobLabels) -> String {
        let mut text = Exposition::default();
        let own = [("kind", labels.kind.as_str()), ("lock", labels.lock.as_str())];
        for ((name, help), value) in GAUGES.into_iter().zip(self.gauges()) {
            if let Some(value) = *value {
                text.family(name, "gauge", help).series(&own, value);
            }
        }
        let running = f64::from(u8::from(self.running));
        text.family(RUNNING, "gauge", "1 while the command runs.").series(&own, running);
        let with = |outcome| [own[0], own[1], ("outcome", outcome)];
        text.family(OUTCOME, "gauge", "1 for the outcome of the last call, 0 for the others.");
        for (i, (_, word)) in ENDS.iter().enumerate() {
            text.series(&with(word), f64::from(u8::from(self.outcome == Some(i))));
        }
        text.family(RUNS, "counter", "Calls, and runs of their commands, by outcome.");
        for ((_, word), count) in ENDS.iter().zip(self.runs) {
            text.series(&with(word), count);
        }
        text.family(LOSSES, "counter", "Locks that were lost.").series(&own, self.losses);
        text.into_text()
    }

    /// The numbers in the text of a file. `None` if the file is of another job, or not ours: its counters are not those of this job.
    pub fn parse(text: &str, labels: &JobLabels) -> Option<Self> {
        let own = format!("{{kind=\"{}\",lock=\"{}\"", escaped(&labels.kind), escaped(&labels.lock));
        let mut found = JobNumbers::default();
        let mut seen = false;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, rest) = line.split_once('{')?;
            let (series, value) = rest.rsplit_once("} ")?;
            let outcome = format!("{{{series}").strip_prefix(&own)?.to_owned();
            let value: f64 = value.parse().ok()?;
            let place = ENDS.iter().position(|(_, word)| outcome == format!(",outcome=\"{word}\""));
            seen = true;
            match (name, place) {
                (RUNNING, _) => found.running = value == 1.0,
                (LOSSES, _) => found.losses = value,
                (OUTCOME, Some(place)) if value == 1.0 => found.outcome = Some(place),
                (RUNS, Some(place)) => found.runs[place] = value,
                _ => {
                    if let Some(place) = GAUGES.iter().position(|(known, _)| *known == name) {
                        *found.gauges()[place] = Some(value);
                    }
                }
            }
        }
        seen.then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(lock: &str) -> JobLabels {
        JobLabels { kind: "run".into(), lock: lock.into() }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut job =
            JobNumbers { wait: Some(0.25), fence: Some(1_794_775_452_413_713.0), ..Default::default() };
        job.running = true;
        job.count(RunEnd::Succeeded);
        job.count(RunEnd::Lost);
        let mine = labels("a\"} 7\\");
        let text = job.clone().render(&mine);
        assert_eq!(JobNumbers::parse(&text, &mine), Some(job));
        assert_eq!(JobNumbers::parse(&text, &labels("b")), None, "the counters of another job");
        for foreign in ["", "nonsense", "x{y=\"z\"} 1\n", "x 1\n"] {
            assert_eq!(JobNumbers::parse(foreign, &mine), None, "{foreign}");
        }
    }
}
