//! What `run` and `hold` say about themselves: lines for people, or JSON lines for machines.

use std::io::IsTerminal;
use std::time::Duration;

use lockkeeper::{Clock, Guard, LockName, LockView, SystemClock};
use serde_json::{Value, json};

use crate::text::{self, plain, quoted};
use crate::{outlet, span};

/// Where the JSON lines go. The stdout of `run` belongs to its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Events {
    Stdout,
    Stderr,
}

/// Who is told, and how.
#[derive(Debug)]
pub struct Report {
    json: Option<Events>,
    quiet: bool,
    names: Vec<LockName>,
}

impl Report {
    pub fn new<'a>(
        names: impl Iterator<Item = &'a LockName>,
        json: bool,
        quiet: bool,
        events: Events,
    ) -> Self {
        Report { json: json.then_some(events), quiet, names: names.cloned().collect() }
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

    /// What is locked, for messages.
    pub fn what(&self) -> String {
        let names: Vec<String> = self.names.iter().map(|n| quoted(n.as_str())).collect();
        names.join(" and ")
    }

    /// One line for a person, on stderr.
    pub fn say(&self, line: &str) {
        if self.json.is_none() && !self.quiet {
            // What others have written may be quoted in it.
            outlet::ERR.post(format!("lockkeeper: {}\n", plain(line)));
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
            Events::Stdout => &outlet::OUT,
            Events::Stderr => &outlet::ERR,
        };
        outlet.post(format!("{object}\n"));
    }

    pub fn waiting(&self, view: &LockView, position: Option<usize>, live: bool) {
        let more = json!({
            "busy": view.name, "held_by": view.held, "waiting": view.waiting, "position": position,
            "delayed_ms": view.delayed_ms,
        });
        self.event("waiting", more);
        if !live {
            self.say(&waiting_line(view, position));
        }
    }

    pub fn granted(&self, guard: &Guard) {
        let left = guard.remaining();
        let deadline = SystemClock.wall().as_micros() + u64::try_from(left.as_micros()).unwrap_or(0);
        let more = json!({
            "fence": guard.fence(), "sequencer": guard.sequencer().to_string(), "ttl_ms": millis(guard.ttl()),
            "deadline_us": deadline, "deadline_in_ms": millis(left),
        });
        self.event("granted", more);
    }
}

/// `waiting for "x": held by settle.sh (host, pid 123) since 3m 20s, fence 17, 2 in line`
pub fn waiting_line(view: &LockView, position: Option<usize>) -> String {
    let mut line = format!("waiting for {}: {}", quoted(view.name.as_str()), held_line(view));
    match (position, view.waiting) {
        (Some(position), n) if n > 1 => line += &format!(", place {position} of {n} in line"),
        (_, n) if n > 0 => line += &format!(", {n} in line"),
        _ => {}
    }
    line
}

/// Who is in the way, in words.
pub fn held_line(view: &LockView) -> String {
    let Some(held) = view.held.first() else {
        return match view.delayed_ms {
            Some(ms) => {
                format!("held back for {} after an unclean end", span::rough(Duration::from_millis(ms)))
            }
            None => "free, and handed to the next in line".into(),
        };
    };
    let who = plain(&held.holder.to_string()).into_owned();
    let since = text::ago(held.since);
    let mut line = if held.lingering {
        let left = span::rough(Duration::from_millis(held.expires_in_ms));
        format!("done by {who}, kept for {left} more by its min-hold")
    } else {
        format!("held by {who} since {since} ago, fence {}", held.fence)
    };
    if let Some(reason) = &held.revoked {
        line += &format!(", told to stop because: {}", plain(reason));
    }
    if view.held.len() > 1 {
        line += &format!(", and by {} more", view.held.len() - 1);
    }
    line
}

pub fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
