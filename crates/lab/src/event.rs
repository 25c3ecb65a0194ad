//! The events of a scenario: what the processes and the director did and saw, one JSON object per line.

use lockkeeper::{BootInstant, Clock, SystemClock};
use serde::{Deserialize, Serialize};

/// An event of a scenario. All processes of the machine share the clock of `t`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabEvent {
    /// When, in nanoseconds of the boot-time clock.
    pub t: u64,
    /// The process, or a part of the set-up such as "store" and "network".
    pub actor: String,
    /// The event itself.
    #[serde(flatten)]
    pub kind: LabEventKind,
}

/// The kinds of events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum LabEventKind {
    /// A process waits for a lock.
    Waits {
        /// The lock.
        lock: String,
    },
    /// From here on a process believes that it holds a lock.
    Holds {
        /// The lock.
        lock: String,
        /// The fence of the grant, if the lock has fences.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fence: Option<u64>,
    },
    /// From here on a process no longer believes that it holds the lock, or no longer waits for it.
    Ends {
        /// The lock.
        lock: String,
        /// Why: released, lost, gave up.
        how: String,
    },
    /// A process says what it does.
    Note {
        /// In its words.
        text: String,
    },
    /// The resource took a write.
    Wrote {
        /// The content.
        text: String,
        /// The fence that came with it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fence: Option<u64>,
    },
    /// The resource refused a write.
    Refused {
        /// The answer.
        text: String,
        /// The fence that came with it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fence: Option<u64>,
    },
    /// A process measured something.
    Figure {
        /// The name of the figure.
        name: String,
        /// Its value.
        value: f64,
    },
    /// The director stopped the process (SIGSTOP).
    Stopped,
    /// The director let the process continue (SIGCONT).
    Continued,
    /// The director killed the process (SIGKILL).
    Killed,
    /// The director broke something else: the network, a server, a clock.
    Fault {
        /// In words.
        text: String,
    },
    /// The director found damage in the resource.
    Damage {
        /// In words.
        text: String,
    },
    /// A process failed in a way that is no part of the scenario.
    Failed {
        /// Its error.
        error: String,
    },
    /// A process has ended.
    Gone,
}

impl LabEvent {
    /// The event, now.
    pub fn now(actor: impl Into<String>, kind: LabEventKind) -> LabEvent {
        LabEvent { t: now().as_nanos(), actor: actor.into(), kind }
    }

    /// The event in words, without its actor. `fence` names a fence.
    pub fn words(&self, fence: impl Fn(u64) -> String) -> Option<String> {
        let with = |n: &Option<u64>| n.map(|n| format!(", fence {}", fence(n))).unwrap_or_default();
        Some(match &self.kind {
            LabEventKind::Waits { lock } => format!("waits for {lock}"),
            LabEventKind::Holds { lock, fence: n } => format!("believes that it holds {lock}{}", with(n)),
            LabEventKind::Ends { lock, how } => format!("{how} {lock}"),
            LabEventKind::Note { text } => text.clone(),
            LabEventKind::Wrote { text, fence: n } => format!("the resource took: {text}{}", with(n)),
            LabEventKind::Refused { text, fence: n } => format!("the resource refused: {text}{}", with(n)),
            LabEventKind::Stopped => "is stopped (SIGSTOP)".into(),
            LabEventKind::Continued => "continues (SIGCONT)".into(),
            LabEventKind::Killed => "is killed (SIGKILL)".into(),
            LabEventKind::Fault { text } => format!("FAULT: {text}"),
            LabEventKind::Damage { text } => format!("DAMAGE: {text}"),
            LabEventKind::Failed { error } => format!("failed: {error}"),
            LabEventKind::Figure { .. } | LabEventKind::Gone => return None,
        })
    }

    /// Whether it is the answer of the resource to a write.
    pub fn is_write(&self) -> bool {
        matches!(self.kind, LabEventKind::Wrote { .. } | LabEventKind::Refused { .. })
    }

    /// Whether the process `actor` did this.
    pub fn is_by(&self, actor: &str) -> bool {
        self.actor == actor
    }
}

/// The time on the clock of the events.
pub fn now() -> BootInstant {
    SystemClock.now()
}
