//! The record with the state of an item.

use lockkeeper_core::{Result, WallTime};
use lockkeeper_host::host_name;
use serde::{Deserialize, Serialize};

use crate::recipes::cas_record::Snapshot;
use crate::recipes::format;

/// As much of a reason as a record keeps.
const REASON_BYTES: usize = 1000;

/// The state of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ItemState {
    /// A worker has given it back, or failed and may try again.
    Open,
    /// A worker has taken it. Without a lease the worker is gone, and another one may take it.
    Taken,
    /// It is done.
    Done,
    /// It has failed for good.
    Failed,
}

/// The state of an item. An item that no worker has taken has no record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ItemRecord {
    pub state: ItemState,
    /// How often workers have taken it.
    pub attempts: u32,
    /// Why the last attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Which process wrote this: for people.
    pub by: String,
    /// When, by the clock of that process: for people.
    pub at: WallTime,
}

impl ItemRecord {
    /// The record of an item that no worker has taken.
    pub fn new() -> ItemRecord {
        ItemRecord {
            state: ItemState::Open,
            attempts: 0,
            error: None,
            by: String::new(),
            at: WallTime::default(),
        }
    }

    pub fn parse(id: &str, snapshot: &Snapshot) -> Result<ItemRecord> {
        format::decode(&format!("of the item {id}"), &snapshot.value)
    }

    pub fn bytes(&self) -> Vec<u8> {
        format::encode(self)
    }

    /// The record that this process writes next.
    pub fn next(&self, state: ItemState, now: WallTime) -> ItemRecord {
        ItemRecord { state, by: this_process(), at: now, ..self.clone() }
    }

    /// Whether no worker takes it any more.
    pub fn is_settled(&self) -> bool {
        matches!(self.state, ItemState::Done | ItemState::Failed)
    }
}

/// This process, for people who look at a record.
pub(super) fn this_process() -> String {
    format!("{}, pid {}", host_name(), std::process::id())
}

/// As much of `reason` as a record keeps.
pub(super) fn cut_reason(reason: &str) -> String {
    let mut end = reason.len().min(REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_cut_between_characters() {
        assert_eq!(cut_reason("short"), "short");
        assert_eq!(cut_reason(&"ж".repeat(700)).len(), REASON_BYTES);
        assert_eq!(cut_reason(&format!("x{}", "ж".repeat(700))).len(), REASON_BYTES - 1);
    }
}
