//! The stored record of a key: one line of JSON, then the result if it is small.

use lockkeeper_core::{Error, Fence, Result};
use serde::{Deserialize, Serialize};

use crate::recipes::format;

/// A run, and its outcome once it has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OnceRecord {
    /// The fence of the run.
    pub fence: Fence,
    /// The fingerprint of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub print: Option<String>,
    /// The outcome; absent during the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<RunOutcome>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunOutcome {
    pub ok: bool,
    /// The size of the result in bytes.
    pub size: usize,
    /// The number of records with the chunks of the result; zero if the result follows the line.
    pub parts: usize,
    /// Why the result could not be stored. The work was done nevertheless, and is not done again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unkept: Option<String>,
}

impl OnceRecord {
    pub fn running(fence: Fence, print: Option<String>) -> OnceRecord {
        OnceRecord { fence, print, done: None }
    }

    /// The record of work that was done and whose result cannot be stored.
    pub fn unkept(fence: Fence, print: Option<String>, ok: bool, why: &str) -> OnceRecord {
        let unkept = Some(why.chars().take(500).collect());
        OnceRecord { fence, print, done: Some(RunOutcome { ok, size: 0, parts: 0, unkept }) }
    }

    pub fn bytes(&self, body: &[u8]) -> Vec<u8> {
        let mut bytes = format::encode(self);
        bytes.push(b'\n');
        bytes.extend_from_slice(body);
        bytes
    }

    /// The record, and the bytes after its line.
    pub fn parse<'a>(key: &str, bytes: &'a [u8]) -> Result<(OnceRecord, &'a [u8])> {
        let end = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
        let record = format::decode(&format!("once/{key}"), &bytes[..end])?;
        Ok((record, bytes.get(end + 1..).unwrap_or_default()))
    }

    /// Refuses another fingerprint: to answer another request with this result would hide the caller's
    /// mistake.
    pub fn check_print(&self, key: &str, print: Option<&str>) -> Result<()> {
        match (&self.print, print) {
            (Some(theirs), Some(ours)) if theirs != ours => Err(Error::invalid(format!(
                "the key {key:?} stands for another request: ask with the same request, or take a new key"
            ))),
            _ => Ok(()),
        }
    }
}

/// The error that every caller of a key receives whose result could not be stored.
pub(super) fn not_kept_error(key: &str, fence: Fence, why: &str) -> Error {
    Error::Unknown(format!(
        "{key:?} was done with fence {fence} and is not done again, but its result could not be kept: {why}"
    ))
}
