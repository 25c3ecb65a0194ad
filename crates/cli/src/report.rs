//! The progress messages of `run`, `hold` and the other jobs: lines for people, or JSON lines for programs.

use std::cell::RefCell;
use std::io::IsTerminal;
use std::time::Duration;

use lockkeeper::{Clock, Guard, LockName, LockView, SystemClock};
use serde_json::{Value, json};

use crate::exit::ExitFailure;
use crate::job_metrics::JobMetrics;
use crate::text::{self, plain, quoted};
use crate::{duration, message_writer};

/// Where the JSON lines go. The stdout of `run` belongs to its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventOutput {
    Stdout,
    Stderr,
}

/// Where the messages of a job go, and in which form.
#[derive(Debug)]
pub struct Report {
    json: Option<EventOutput>,
    quiet: bool,
    names: Vec<LockName>,
    metrics: Option<RefCell<JobMetrics>>,
}

impl Report {
    pub fn new<'a>(
        names: impl Iterator<Item = &'a LockName>,
        json: bool,
        quiet: bool,
        events: EventOutput,
    ) -> Self {
        Report { json: json.then_some(events), quiet, names: names.cloned().collect(), metrics: None }
    }

    /// Keeps the numbers of the job, too.
    pub fn with_metrics(self, metrics: JobMetrics) -> Self {
        Report { metrics: Some(RefCell::new(metrics)), ..self }
    }

    /// Passes an event of the job on to its numbers, if they are kept.
    pub fn measure(&self, event: impl FnOnce(&mut JobMetrics)) {
        if let Some(metrics) = &self.metrics {
            let mut metrics = metrics.borrow_mut();
            event(&mut metrics);
            self.warn_of_metrics(metrics.failure());
        }
    }

    /// Writes the numbers of a call that has ended to their file. A file that cannot be written fails no job.
    pub fn finish(&self, result: Result<i32, ExitFailure>) -> Result<i32, ExitFailure> {
        if let Some(metrics) = &self.metrics {
            self.warn_of_metrics(metrics.borrow_mut().finish(&result));
        }
        result
    }

    fn warn_of_metrics(&self, failure: Option<String>) {
        if let Some(why) = failure {
            self.say(&format!("warning: {why}"));
            self.event("warning", json!({ "why": why }));
        }
    }

    /// Whether a person watches: a spinner makes sense.
    pub fn is_live(&self) -> bool {
        self.json.is_none() && !self.quiet && std::io::stderr().is_terminal()
    }

    /// Whether everything is said in JSON.
    pub fn is_json(&self) -> bool {
        self.json.is_some()
    }

    /// Whether nothing but errors is wanted.
    pub fn is_quiet(&self) -> bool {
        self.quiet && self.json.is_none()
    }

    /// The locked names, for messages.
    pub fn what(&self) -> String {
        let names: Vec<String> = self.names.iter().map(|n| quoted(n.as_str())).collect();
        names.join(" and ")
    }

    /// One line for a person, on stderr.
    pub fn say(&self, line: &str) {
        if !self.quiet {
            self.say_though_quiet(line);
        }
    }

    /// The same, also for a user who wants errors only.
    pub fn say_though_quiet(&self, line: &str) {
        if self.json.is_none() {
            // The line may quote text of other users.
            message_writer::STDERR.enqueue(format!("lockkeeper: {}\n", plain(line)));
        }
    }

    /// One event for a machine.
    pub fn event(&self, event: &str, more: Value) {
        let Some(to) = self.json else { return };
        let mut object = json!({ "event": event, "name": self.names[0] });
        if self.names.len() > 1 {
            object["also"] = json!(self.names[1..]);
        }
        if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
            object.extend(more);
        }
        // A reader that went away or is slow must not end the command's protection.
        let outlet = match to {
            EventOutput::Stdout => &message_writer::STDOUT,
            EventOutput::Stderr => &message_writer::STDERR,
        };
        outlet.enqueue(format!("{object}\n"));
    }

    pub fn waiting(&self, view: &LockView, position: Option<usize>, live: bool) {
        let more = json!({
            "busy": view.name, "held_by": view.held, "waiting": view.waiting, "position": position,
            "delayed_ms": view.delayed_ms,
        });
        self.event("waiting", more);
        if !live {
            self.say(&describe_wait(view, position));
        }
    }

    pub fn granted(&self, guard: &Guard) {
        self.measure(|job| job.granted(guard));
        let left = guard.remaining();
        let deadline = SystemClock.wall().as_micros() + u64::try_from(left.as_micros()).unwrap_or(0);
        let more = json!({
            "fence": guard.fence(), "sequencer": guard.sequencer().to_string(), "ttl_ms": millis(guard.ttl()),
            "deadline_us": deadline, "deadline_in_ms": millis(left),
        });
        self.event("granted", more);
    }
}

/// `waiting for "x": held by settle.sh (host, pid 123) since 3m 20s, fence 17, 2 in the queue`
pub fn describe_wait(view: &LockView, position: Option<usize>) -> String {
    let mut line = format!("waiting for {}: {}", quoted(view.name.as_str()), describe_holder(view));
    match (position, view.waiting) {
        (Some(position), n) if n > 1 => line += &format!(", position {position} of {n} in the queue"),
        (_, n) if n > 0 => line += &format!(", {n} in the queue"),
        _ => {}
    }
    line
}

/// The holder of a lock, or why it is held back, in words.
pub fn describe_holder(view: &LockView) -> String {
    let Some(held) = view.held.first() else {
        return match view.delayed_ms {
            Some(ms) => {
                format!("held back for {} after an unclean end", duration::rough(Duration::from_millis(ms)))
            }
            None => "free, and handed to the next waiter".into(),
        };
    };
    let who = plain(&held.holder.to_string()).into_owned();
    let since = text::ago(held.since);
    let mut line = if held.lingering {
        let left = duration::rough(Duration::from_millis(held.expires_in_ms));
        format!("done by {who}, kept for {left} more by its min-hold")
    } else {
        format!("held by {who} since {since} ago, fence {}", held.fence)
    };
    if let Some(reason) = &held.revoked {
        line += &format!(", asked to stop because: {}", plain(reason));
    }
    if view.held.len() > 1 {
        line += &format!(", and by {} more", view.held.len() - 1);
    }
    line
}

pub fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
