//! A lock request, what a store answers to it, and the limits that apply to all stores.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Attempt, BootInstant, Error, Fence, Holder, HolderView, LockName, Names, Owner, Result};

/// The limits that are the same for every store.
pub mod limits {
    use crate::{Error, Result};
    use std::time::Duration;
    /// Bytes of a lock name.
    pub const NAME_BYTES: usize = 512;
    /// Names of one request.
    pub const NAMES: usize = 64;
    /// Bytes of a host name or a label.
    pub const LABEL_BYTES: usize = 256;
    /// Bytes of a reason for breaking a lock.
    pub const REASON_BYTES: usize = 1024;
    /// Bytes of a record's value.
    pub const VALUE_BYTES: usize = 1 << 20;
    /// The shortest lease: shorter ones end before a busy machine can renew them.
    pub const TTL_MIN: Duration = Duration::from_millis(100);
    /// The longest lease, and the longest lock-delay and min-hold: no lock stays held for longer than a day after its holder is gone.
    pub const TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);
    /// Permits of one lock.
    pub const PERMITS: u32 = 1_000_000;
    /// Rate limits of one request.
    pub const BUCKETS: usize = 16;
    /// Items on one page of a list.
    pub const PAGE: usize = 1000;

    /// Checks the reason for a break: one line of text without control characters.
    pub fn check_reason(reason: &str) -> Result<()> {
        if reason.trim().is_empty() {
            return Err(Error::invalid(
                "the reason is empty: say why the lock is broken, other operators will want to know",
            ));
        }
        if reason.len() > REASON_BYTES || reason.chars().any(char::is_control) {
            return Err(Error::invalid(format!("a reason is one line of at most {REASON_BYTES} bytes")));
        }
        Ok(())
    }
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One holder and no other.
    Exclusive,
    /// Any number of shared holders, and no exclusive one.
    Shared,
    /// One of this many permits. If requests name different numbers, the smallest applies.
    Permit(u32),
}

/// How long a request waits in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// Not at all: granted at once, or busy.
    No,
    /// This long, then busy.
    For(Duration),
    /// Until granted or withdrawn.
    Forever,
}

impl Wait {
    /// When a wait that begins at `now` ends.
    pub fn deadline(self, now: BootInstant) -> BootInstant {
        match self {
            Wait::No => now,
            Wait::For(time) => now + time,
            Wait::Forever => BootInstant::NEVER,
        }
    }
}

/// Identifies a grant or a queue entry. The attempt proves that the caller owns it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey {
    /// The proof of ownership.
    pub attempt: Attempt,
    /// The names that the request is for.
    pub names: Names,
}

/// A request for one or several locks. A store grants several names all or nothing, with one fence and one deadline.
#[derive(Clone, Debug)]
pub struct LockRequest {
    /// The attempt and the names.
    pub key: RequestKey,
    /// The owner of the request. A request without an owner excludes every other request.
    pub owner: Option<Owner>,
    /// How the lock is to be held.
    pub mode: Mode,
    /// How long the lease lasts without a renewal.
    pub ttl: Duration,
    /// How long to wait in the queue.
    pub wait: Wait,
    /// How long the store grants the lock to no other request after an unclean end (expiry, death, break).
    pub lock_delay: Duration,
    /// How long the lock stays held after the grant, also if the holder releases it earlier.
    pub min_hold: Duration,
    /// The process that sends the request, for display.
    pub holder: Arc<Holder>,
}

impl LockRequest {
    /// An exclusive request that does not wait, without options.
    pub fn new(attempt: Attempt, names: impl Into<Names>, ttl: Duration, holder: Arc<Holder>) -> Self {
        LockRequest {
            key: RequestKey { attempt, names: names.into() },
            owner: None,
            mode: Mode::Exclusive,
            ttl,
            wait: Wait::No,
            lock_delay: Duration::ZERO,
            min_hold: Duration::ZERO,
            holder,
        }
    }

    /// Checks the numbers. Every store calls this before it sends anything.
    pub fn check(&self) -> Result<()> {
        if self.ttl < limits::TTL_MIN || self.ttl > limits::TTL_MAX {
            return Err(Error::invalid(format!("the ttl is {:?}: 100ms to 24h are possible", self.ttl)));
        }
        for (what, d) in [("lock delay", self.lock_delay), ("min hold", self.min_hold)] {
            if d > limits::TTL_MAX {
                return Err(Error::invalid(format!("the {what} is {d:?}: at most 24h are possible")));
            }
        }
        match self.mode {
            Mode::Permit(n) if n == 0 || n > limits::PERMITS => {
                Err(Error::invalid(format!("{n} permits: 1 to {} are possible", limits::PERMITS)))
            }
            _ => Ok(()),
        }
    }
}

/// The right to a lock, for as long as its lease lasts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The attempt and the names.
    pub key: RequestKey,
    /// The fencing token, which the holder sends with every write.
    pub fence: Fence,
    /// How it is held.
    pub mode: Mode,
    /// How long the lease lasts from each good renewal.
    pub ttl: Duration,
    /// When the client sent the request that was granted. The lease counts from here, never from the reply.
    pub sent_at: BootInstant,
    /// How long the first lease lasts from `sent_at`: the ttl, or less if the store gives less until the first renewal.
    pub lease: Duration,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcquireOutcome {
    /// The store granted the request.
    Granted(Grant),
    /// Another process holds the lock, and the wait time is over.
    Busy(Busy),
}

/// Which holders block a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Busy {
    /// The first of the requested names that is not free.
    pub name: LockName,
    /// The holders, at most [`crate::LockView::BUSY`] of them.
    pub held: Vec<HolderView>,
    /// How many requests wait for it.
    pub waiting: usize,
}

impl std::fmt::Display for Busy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} is held", self.name.as_str())?;
        if let Some(held) = self.held.first() {
            write!(f, " by {} (fence {})", held.holder, held.fence)?;
        }
        if self.held.len() > 1 {
            write!(f, " and {} more", self.held.len() - 1)?;
        }
        if self.waiting > 0 {
            write!(f, ", {} waiting", self.waiting)?;
        }
        Ok(())
    }
}

/// The answer to a renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    /// The lease counts anew from the moment the renewal was sent.
    Renewed,
    /// The grant is gone: expired, broken, or never there.
    Lost,
    /// An operator asks the holder to release the lock, for this reason (see [`crate::Locks::revoke`]). The grant still excludes other requests
    /// until the holder releases it or its lease ends; the store did not renew the lease.
    Revoked(Arc<str>),
    /// The store has no answer for this grant, although it answered others of the same call. It may have renewed the grant; the client retries.
    Unknown,
}

/// The answer to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// The grant was the caller's and is released; or the request left the queue.
    Released,
    /// The caller held nothing (any more); the store changed nothing.
    AlreadyGone,
}
