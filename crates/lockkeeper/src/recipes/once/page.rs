//! What the record of a key says: one line of JSON, then the result if it is small.

use lockkeeper_core::{Error, Fence, Result};
use serde::{Deserialize, Serialize};

/// Who runs, or what it came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    /// The fence of the run.
    pub fence: Fence,
    /// A hash of what was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub print: Option<String>,
    /// What it came to; not there while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<Outcome>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Outcome {
    pub ok: bool,
    /// Bytes of the result.
    pub size: usize,
    /// Records that the result is in; none if it follows the line.
    pub parts: usize,
    /// Why the result could not be kept. It was done nevertheless, and is not done again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unkept: Option<String>,
}

impl Page {
    pub fn running(fence: Fence, print: Option<String>) -> Page {
        Page { fence, print, done: None }
    }

    /// The work was done, and its result cannot be kept.
    pub fn unkept(fence: Fence, print: Option<String>, ok: bool, why: &str) -> Page {
        let unkept = Some(why.chars().take(500).collect());
        Page { fence, print, done: Some(Outcome { ok, size: 0, parts: 0, unkept }) }
    }

    pub fn bytes(&self, body: &[u8]) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a page is plain data");
        bytes.push(b'\n');
        bytes.extend_from_slice(body);
        bytes
    }

    /// The page, and what follows it.
    pub fn parse<'a>(key: &str, bytes: &'a [u8]) -> Result<(Page, &'a [u8])> {
        let end = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
        let page = serde_json::from_slice(&bytes[..end]).map_err(|e| {
            Error::invalid(format!(
                "the record once/{key} was not written by this program ({e}): use another key, or delete the record"
            ))
        })?;
        Ok((page, bytes.get(end + 1..).unwrap_or_default()))
    }

    /// The same key for something else is a mistake, and answering it with this result would hide it.
    pub fn check_print(&self, key: &str, print: Option<&str>) -> Result<()> {
        match (&self.print, print) {
            (Some(theirs), Some(ours)) if theirs != ours => Err(Error::invalid(format!(
                "the key {key:?} stands for another request: ask with the same request, or take a new key"
            ))),
            _ => Ok(()),
        }
    }
}

/// What every caller gets of a key whose result could not be kept.
pub(super) fn told_unkept(key: &str, fence: Fence, why: &str) -> Error {
    Error::Unknown(format!(
        "{key:?} was done with fence {fence} and is not done again, but its result could not be kept: {why}"
    ))
}
