//! The record of a job's windows: the newest window that was begun, and how its runs ended.

use lockkeeper_core::{Fence, Result};
use serde::{Deserialize, Serialize};

use crate::recipes::format;

/// The newest window of a job, and its last runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct WindowRecord {
    /// When the newest window that was begun begins, in milliseconds since 1970.
    pub at_ms: u64,
    /// The fence of its newest run.
    pub fence: Fence,
    /// Its newest run has ended.
    pub done: bool,
    /// When the newest window before it began; `None` if it is the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_ms: Option<u64>,
    /// The time zone of the windows; `None` if no runner has set one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// The host that began the newest run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// When that host began it, by its clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<u64>,
    /// How many runs of the newest window have failed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failures: u32,
    /// The newest run that has ended, of this window or one before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<EndedRun>,
    /// The newest run that ended with exit code 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub succeeded: Option<EndedRun>,
}

/// A run that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct EndedRun {
    /// When its window begins, in milliseconds since 1970.
    pub at_ms: u64,
    /// Its fence.
    pub fence: Fence,
    /// The exit code of its command: 0 means success.
    pub exit_code: i32,
    /// The host that ran it.
    pub host: String,
    /// When it began, by the clock of that host.
    pub started_ms: u64,
    /// When it ended, by the clock of that host.
    pub ended_ms: u64,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

impl WindowRecord {
    pub(super) fn parse(name: &str, bytes: &[u8]) -> Result<WindowRecord> {
        format::decode(&format!("window/{name}"), bytes)
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        format::encode(self)
    }

    /// The exit code of the newest window, if its last run has ended with one.
    pub fn exit_code(&self) -> Option<i32> {
        self.ended.as_ref().filter(|run| self.done && run.at_ms == self.at_ms).map(|run| run.exit_code)
    }

    /// Whether the newest window needs no more runs, if a failed one is run again `retries` times.
    pub(super) fn is_settled(&self, retries: u32) -> bool {
        self.done && (self.exit_code().unwrap_or(0) == 0 || self.failures > retries)
    }
}
