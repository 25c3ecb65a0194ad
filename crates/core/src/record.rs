//! Records: small versioned values, and what a store answers to writes and deletes.

use std::time::Duration;

use crate::{Error, LockName, Result, limits};

/// The version of a record: grows with every write, and a record that is created again never repeats one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Version(pub u64);

/// A small versioned value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its key.
    pub key: LockName,
    /// Its value.
    pub value: Vec<u8>,
    /// The version that its last write got.
    pub version: Version,
}

impl Record {
    /// Checks a value's size and a ttl. Every store calls this before it writes.
    pub fn check(value: &[u8], ttl: Option<Duration>) -> Result<()> {
        if value.len() > limits::VALUE_BYTES {
            let (len, max) = (value.len(), limits::VALUE_BYTES);
            return Err(Error::Limited(format!("a record may have {max} bytes, this one has {len}")));
        }
        if ttl.is_some_and(|ttl| ttl < limits::TTL_MIN) {
            return Err(Error::invalid("a record's ttl is at least 100ms"));
        }
        Ok(())
    }
}

/// The condition of a write or a delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// There is no such record.
    Absent,
    /// The record has this version.
    Version(Version),
    /// Nothing.
    Any,
}

impl Expect {
    /// Whether the present version meets the expectation.
    pub fn met_by(self, found: Option<Version>) -> bool {
        match self {
            Expect::Absent => found.is_none(),
            Expect::Version(v) => found == Some(v),
            Expect::Any => true,
        }
    }
}

/// The answer to a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// Written, with this version.
    Written(Version),
    /// The expectation was not met; this is the present record.
    Conflict(Option<Record>),
}

/// The answer to a delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    /// The record is deleted.
    Deleted,
    /// There was nothing to delete.
    Absent,
    /// The expectation was not met; this is the present record.
    Conflict(Record),
}

/// One page of records, in order of their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordPage {
    /// The records.
    pub records: Vec<Record>,
    /// Where the next page begins, if there is one: pass it as [`crate::Page::after`].
    pub next: Option<LockName>,
}
