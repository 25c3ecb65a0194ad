use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Attempt, Error, Fence, Held, Holder, LockName, Moment, Names, Owner, Result};

/// The limits that are the same for every store.
pub mod limits {
    use crate::{Error, Result};
    use std::time::Duration;
    /// Bytes of a lock name.
    pub const NAME_BYTES: usize = 512;
    /// Names of one ask.
    pub const NAMES: usize = 64;
    /// Bytes of a host name or a label.
    pub const LABEL_BYTES: usize = 256;
    /// Bytes of a reason for breaking a lock.
    pub const REASON_BYTES: usize = 1024;
    /// Bytes of a record's value.
    pub const VALUE_BYTES: usize = 1 << 20;
    /// The shortest lease: shorter ones end before a busy machine can renew them.
    pub const TTL_MIN: Duration = Duration::from_millis(100);
    /// The longest lease, and the longest lock-delay and min-hold: nothing stays stuck for longer than a day.
    pub const TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);
    /// Permits of one lock.
    pub const PERMITS: u32 = 1_000_000;
    /// Items on one page of a list.
    pub const PAGE: usize = 1000;

    /// Checks the reason for a break: some text, not too much, nothing that plays with a terminal.
    pub fn check_reason(reason: &str) -> Result<()> {
        if reason.trim().is_empty() {
            return Err(Error::invalid("the reason is empty: say why the lock is broken, others will ask"));
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
    /// One holder, nobody else.
    Exclusive,
    /// Any number of shared holders, and no exclusive one.
    Shared,
    /// One of this many. Asks that name different numbers are kept to the smallest.
    Permit(u32),
}

/// How long an ask stands in line.
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
    /// When a wait that begins at `now` is over.
    pub fn deadline(self, now: Moment) -> Moment {
        match self {
            Wait::No => now,
            Wait::For(time) => now + time,
            Wait::Forever => Moment::NEVER,
        }
    }
}

/// Which grant or place in line is meant: the attempt proves the right to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The proof of ownership.
    pub attempt: Attempt,
    /// What it was asked for.
    pub names: Names,
}

/// A request for one or several locks. Several are granted all or nothing, with one fence and one deadline.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The attempt and the names.
    pub claim: Claim,
    /// Whose ask this is; without one it excludes every other.
    pub owner: Option<Owner>,
    /// How it is to be held.
    pub mode: Mode,
    /// How long our silence may last.
    pub ttl: Duration,
    /// How long to stand in line.
    pub wait: Wait,
    /// How long nobody else gets the lock after an unclean end (expiry, death, break).
    pub lock_delay: Duration,
    /// How long the lock stays taken from its grant on, even when it is released earlier.
    pub min_hold: Duration,
    /// Who asks, for display.
    pub holder: Arc<Holder>,
}

impl Ask {
    /// An exclusive ask that does not wait, with nothing special about it.
    pub fn new(attempt: Attempt, names: impl Into<Names>, ttl: Duration, holder: Arc<Holder>) -> Self {
        Ask {
            claim: Claim { attempt, names: names.into() },
            owner: None,
            mode: Mode::Exclusive,
            ttl,
            wait: Wait::No,
            lock_delay: Duration::ZERO,
            min_hold: Duration::ZERO,
            holder,
        }
    }

    /// Checks the numbers. Every store calls this before it does anything.
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
    pub claim: Claim,
    /// The number that travels with every write.
    pub fence: Fence,
    /// How it is held.
    pub mode: Mode,
    /// How long the lease lasts from each good renewal.
    pub ttl: Duration,
    /// The lease counts from here: the moment at which the request that won it was sent, never the reply's.
    pub sent_at: Moment,
    /// How long the first lease lasts from there: the ttl, or less if the store has said less until the first renewal.
    pub lease: Duration,
}

/// The answer to an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// It is yours.
    Granted(Grant),
    /// Someone else has it, and the ask's patience is over.
    Busy(Busy),
}

/// Who is in the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Busy {
    /// The first of the asked names that is not free.
    pub name: LockName,
    /// Who holds it (at most a few of them).
    pub held: Vec<Held>,
    /// How many stand in line for it.
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
            write!(f, ", {} in line", self.waiting)?;
        }
        Ok(())
    }
}

/// The answer to a renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The lease counts anew from the moment the renewal was sent.
    Renewed,
    /// The grant is gone: expired, broken, or never there.
    Lost,
    /// The lock is to be given back, for this reason (see [`crate::Locks::revoke`]). The grant is still there, and keeps others out until it
    /// is released or its lease is over; the lease was not counted anew.
    Revoked(Arc<str>),
    /// This one was not answered, though others of the same call were: it may have been renewed, and is tried again.
    Unknown,
}

/// The answer to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// It was yours and is not any more; or the ask left the line.
    Released,
    /// It was not yours (any more); nothing was changed.
    AlreadyGone,
}
