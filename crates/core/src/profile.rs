use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// What a lock is for; asked first, because it is answered differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Twice would be a waste. Any store will do.
    #[default]
    Efficiency,
    /// Twice would be harm. Only a store that keeps fences and grants over a crash will do.
    Correctness,
}

/// How far a promise goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Promise {
    /// Kept, whatever happens to the processes that use it.
    Kept,
    /// Kept unless something named in the notes happens.
    Likely,
    /// Not kept.
    No,
}

/// How asks wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Waiting {
    /// In line, first come, first served.
    Line,
    /// Each tries again after a while; no order.
    Poll,
}

/// What a store keeps and what it does not, in its own words. The laws hold it to that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// The scheme of the store's URL.
    pub store: String,
    /// X: no two valid guards of one lock at once, while clock rates differ by less than the margin.
    pub exclusion: Promise,
    /// F: fences strictly grow, over release, expiry, crash, restart, clean-up and fail-over.
    pub fence: Promise,
    /// A grant that was told survives a crash of the store.
    pub durable: Promise,
    /// How asks wait.
    pub waiting: Waiting,
    /// W: how long after a lock became free the next waiter is let in, at most; also if a message was lost, and however many dead waiters
    /// stand in front of it.
    #[serde(rename = "wake_ms", with = "millis")]
    pub wake: Duration,
    /// Shared locks.
    pub shared: bool,
    /// Permits.
    pub permits: bool,
    /// Several names at once, all or nothing.
    pub several: bool,
    /// Re-entry by an explicit owner.
    pub reentry: bool,
    /// Cycles of waiting owners are found.
    pub deadlocks: bool,
    /// Lock-delay after an unclean end.
    pub lock_delay: bool,
    /// A minimum hold that outlasts its holder.
    pub min_hold: bool,
    /// Watching changes as they happen.
    pub watch: bool,
    /// A lock can be revoked: broken without letting the next one in before the holder has stopped.
    pub revoke: bool,
    /// Records.
    pub records: bool,
    /// What a user of this store should know: what it does not promise, and what was found amiss at open. The gravest
    /// comes first.
    pub notes: Vec<String>,
}

impl Profile {
    /// Whether the store may be used for `purpose`; if not, the reason and what to use instead.
    pub fn allows(&self, purpose: Purpose) -> Result<()> {
        let missing = match (purpose, self.fence, self.durable) {
            (Purpose::Efficiency, ..) | (_, Promise::Kept, Promise::Kept) => return Ok(()),
            (_, Promise::Kept, _) => "it can forget a grant when it crashes",
            _ => "its fences can go back when it crashes",
        };
        // All that was found: one thing at a time, each would be learnt of by another attempt.
        let why = if self.notes.is_empty() { String::new() } else { format!(" ({})", self.notes.join("; ")) };
        Err(Error::Unsupported(format!(
            "the {} store, as it is, is not for correctness: {missing}{why}. Use sqlite:PATH on one host or etcd://HOSTS for \
             a fleet, or ask for efficiency",
            self.store
        )))
    }
}

mod millis {
    use super::Duration;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        u64::deserialize(d).map(Duration::from_millis)
    }
}
