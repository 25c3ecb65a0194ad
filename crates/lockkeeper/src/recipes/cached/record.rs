//! The stored records of a key: the value, the mark that says that it is fresh, and the last failure.

use lockkeeper_core::{Fence, Result};
use serde::{Deserialize, Serialize};

use super::FailedRefresh;
use crate::recipes::format;

/// `cached/KEY`: one line of JSON, then the value if it is small. The store removes the record when the old
/// value is not to be given any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CachedRecord {
    /// The fence of the caller that stored the value, or that computes the first one.
    pub fence: Fence,
    /// Absent while the first value is computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<StoredValue>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StoredValue {
    /// The size of the value in bytes.
    pub size: usize,
    /// The number of records with the chunks of the value; zero if the value follows the line.
    pub parts: usize,
    /// Whether the value is in a cache of the user's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub external: bool,
    /// When it was stored, by the wall clock of the caller that computed it. Only the early refresh uses it.
    pub made_ms: u64,
    /// How long the work took.
    pub took_ms: u64,
    /// How long it is fresh.
    pub life_ms: u64,
}

/// `cached-fresh/KEY`: as long as this record exists, the value with this fence is fresh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FreshMark {
    pub fence: Fence,
}

/// `cached-failed/KEY`: as long as this record exists, no caller tries again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FailureMark {
    pub fence: Fence,
    pub error: String,
    /// Whether the failure is the answer if there is no value.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub negative: bool,
}

impl FailureMark {
    pub fn reported(&self) -> FailedRefresh {
        FailedRefresh { error: self.error.clone(), fence: self.fence }
    }
}

impl CachedRecord {
    pub fn bytes(&self, body: &[u8]) -> Vec<u8> {
        let mut bytes = format::encode(self);
        bytes.push(b'\n');
        bytes.extend_from_slice(body);
        bytes
    }

    /// The record, and the bytes after its line.
    pub fn parse<'a>(key: &str, bytes: &'a [u8]) -> Result<(CachedRecord, &'a [u8])> {
        let end = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
        let record = format::decode(&format!("cached/{key}"), &bytes[..end])?;
        Ok((record, bytes.get(end + 1..).unwrap_or_default()))
    }
}
