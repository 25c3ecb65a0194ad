//! The errors, and the one table of outcomes for Rust, HTTP, RESP, JSON and exit codes.

use serde::{Deserialize, Serialize};

use crate::{Busy, Fence, LockName};

/// The result type of Lockkeeper.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error. Each variant tells the caller what to *do*.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another process holds the lock: wait longer, or do something else.
    #[error("{0}")]
    Busy(Box<Busy>),
    /// The caller held the lock and lost it: stop, do not hurry to finish.
    #[error("the lock is lost: {0}")]
    Lost(String),
    /// The resource has seen a newer fence: the caller's work is out of date, drop it.
    #[error("fence {presented} is stale: {seen} was seen already")]
    Stale {
        /// The fence that the caller presented.
        presented: Fence,
        /// The newest one seen.
        seen: Fence,
    },
    /// The store may have carried the call out: retry with the same attempt, or read the state.
    #[error("it may have happened: {0}")]
    Unknown(String),
    /// The store did not carry the call out; a retry is safe.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// A bad name, ttl or option: correct the call.
    #[error("{0}")]
    Invalid(String),
    /// This store cannot do that: use another one.
    #[error("{0}")]
    Unsupported(String),
    /// Not allowed: get the right first.
    #[error("not allowed: {0}")]
    Denied(String),
    /// The wait would never end: release what you hold, then try again.
    #[error("waiting would deadlock over {}", list(.0))]
    Deadlock(Vec<LockName>),
    /// A limit was reached: slow down, or raise it.
    #[error("limit reached: {0}")]
    Limited(String),
}

fn list(names: &[LockName]) -> String {
    names.iter().map(|n| format!("{:?}", n.as_str())).collect::<Vec<_>>().join(" and ")
}

impl Error {
    /// Shorthand for [`Error::Invalid`].
    pub fn invalid(text: impl Into<String>) -> Self {
        Error::Invalid(text.into())
    }

    /// The row of the table of outcomes for this error.
    pub fn outcome(&self) -> Outcome {
        match self {
            Error::Busy(_) => Outcome::Busy,
            Error::Lost(_) => Outcome::Lost,
            Error::Stale { .. } => Outcome::Stale,
            Error::Unknown(_) => Outcome::Unknown,
            Error::Unavailable(_) => Outcome::Unavailable,
            Error::Invalid(_) => Outcome::Invalid,
            Error::Unsupported(_) => Outcome::Unsupported,
            Error::Denied(_) => Outcome::Denied,
            Error::Deadlock(_) => Outcome::Deadlock,
            Error::Limited(_) => Outcome::Limited,
        }
    }
}

/// The one table of outcomes: the same meanings in Rust, HTTP, RESP, JSON and exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Done.
    Done,
    /// Another process holds the lock.
    Busy,
    /// The caller held the lock and lost it.
    Lost,
    /// A newer fence was seen.
    Stale,
    /// It may have happened.
    Unknown,
    /// It did not happen, retry is safe.
    Unavailable,
    /// Bad name, ttl or option.
    Invalid,
    /// This store cannot.
    Unsupported,
    /// Not allowed.
    Denied,
    /// Would deadlock.
    Deadlock,
    /// A limit was reached.
    Limited,
    /// There is no such record. An answer, never an [`Error`]: a read of an absent record is no mistake.
    Absent,
}

impl Outcome {
    /// Every row of the table.
    pub const ALL: [Outcome; 12] = [
        Outcome::Done,
        Outcome::Busy,
        Outcome::Lost,
        Outcome::Stale,
        Outcome::Unknown,
        Outcome::Unavailable,
        Outcome::Invalid,
        Outcome::Unsupported,
        Outcome::Denied,
        Outcome::Deadlock,
        Outcome::Limited,
        Outcome::Absent,
    ];

    const fn row(self) -> (&'static str, u8, u16, &'static str) {
        match self {
            Outcome::Done => ("done", 0, 200, ""),
            Outcome::Busy => ("busy", 75, 409, "BUSY"),
            Outcome::Lost => ("lost", 76, 410, "LOST"),
            Outcome::Stale => ("stale", 65, 412, "STALE"),
            Outcome::Unknown => ("unknown", 74, 504, "UNKNOWN"),
            Outcome::Unavailable => ("unavailable", 69, 503, "UNAVAILABLE"),
            Outcome::Invalid => ("invalid", 64, 400, "INVALID"),
            Outcome::Unsupported => ("unsupported", 78, 501, "UNSUPPORTED"),
            Outcome::Denied => ("denied", 77, 403, "NOPERM"),
            Outcome::Deadlock => ("deadlock", 73, 423, "DEADLOCK"),
            Outcome::Limited => ("limited", 72, 429, "LIMITED"),
            Outcome::Absent => ("absent", 66, 404, "ABSENT"),
        }
    }

    /// The name of the outcome in JSON and logs.
    pub const fn as_str(self) -> &'static str {
        self.row().0
    }

    /// The exit code of the command. For [`Outcome::Done`] a child's own code takes its place.
    pub const fn exit_code(self) -> u8 {
        self.row().1
    }

    /// The HTTP status.
    pub const fn http_status(self) -> u16 {
        self.row().2
    }

    /// The first word of a RESP error.
    pub const fn resp(self) -> &'static str {
        self.row().3
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_outcome_has_its_own_code_everywhere() {
        let all = Outcome::ALL;
        assert_eq!(all.iter().map(|o| o.exit_code()).collect::<HashSet<_>>().len(), all.len());
        assert_eq!(all.iter().map(|o| o.http_status()).collect::<HashSet<_>>().len(), all.len());
        assert_eq!(all.iter().map(|o| o.resp()).collect::<HashSet<_>>().len(), all.len());
        for o in all {
            assert_eq!(serde_json::to_string(&o).unwrap(), format!("{:?}", o.as_str()));
        }
    }
}
