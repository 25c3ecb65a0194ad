//! The declarations of a store about itself, and which purposes it may serve.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::faults::{Deployment, Guarantees};
use crate::{Error, Finding, LockRequest, Mode, Promise, Result, Severity};

/// The purpose of a lock. It decides which stores may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Doing the work twice is a waste. Any store will do.
    #[default]
    Efficiency,
    /// Doing the work twice is harm. Only a store that keeps fences and grants over a crash will do.
    Correctness,
}

/// How far a store keeps a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Guarantee {
    /// Kept, whatever happens to the processes that use it.
    Kept,
    /// Kept unless something named in the findings happens.
    Likely,
    /// Not kept.
    No,
}

impl Guarantee {
    /// The weaker of the two.
    #[must_use]
    pub fn weaker(self, other: Guarantee) -> Guarantee {
        match (self, other) {
            (Guarantee::No, _) | (_, Guarantee::No) => Guarantee::No,
            (Guarantee::Likely, _) | (_, Guarantee::Likely) => Guarantee::Likely,
            (Guarantee::Kept, Guarantee::Kept) => Guarantee::Kept,
        }
    }
}

/// In which order waiters get a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitOrder {
    /// In a queue: first come, first served.
    Queue,
    /// Each waiter polls; there is no order.
    Poll,
}

/// How a store decides about rate limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitSupport {
    /// In one atomic step, by the store's own clock.
    Native,
    /// By compare-and-swap over a record, with the clocks of the clients: at least two round trips for each take that is allowed.
    CompareAndSwap,
    /// Not at all.
    No,
}

/// The guarantees of a store, and the features that it lacks. The laws of the test kit hold it to that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// The scheme of the store's URL.
    pub store: String,
    /// The columns of the [table of faults](crate::faults) that describe this store as it is deployed. The guarantees below are the
    /// weakest of them. Empty for a store that is not in the table.
    #[serde(default)]
    pub deployments: Vec<Deployment>,
    /// X: no two valid guards of one lock at once, while clock rates differ by less than the margin.
    pub exclusion: Guarantee,
    /// F: fences strictly grow, over release, expiry, crash, restart, clean-up and fail-over.
    pub fence: Guarantee,
    /// A grant that was reported survives a crash of the store.
    pub durable: Guarantee,
    /// In which order waiters get a lock.
    pub waiting: WaitOrder,
    /// W: the longest time from the moment a lock is free to the grant of the next waiter; also if a notification was lost, and however many
    /// dead waiters are in front of it in the queue.
    #[serde(rename = "wake_ms", with = "millis")]
    pub wake: Duration,
    /// Shared locks.
    pub shared: bool,
    /// Permits.
    pub permits: bool,
    /// Several names at once, all or nothing.
    pub multi_name: bool,
    /// Re-entry by an explicit owner.
    pub reentry: bool,
    /// The store finds cycles of waiting owners.
    pub deadlocks: bool,
    /// Lock-delay after an unclean end.
    pub lock_delay: bool,
    /// A minimum hold that outlasts its holder.
    pub min_hold: bool,
    /// Watching changes as they happen.
    pub watch: bool,
    /// A lock can be revoked: the next waiter gets it only after the holder has stopped.
    pub revoke: bool,
    /// Records.
    pub records: bool,
    /// Rate limits.
    pub limits: LimitSupport,
    /// Missing guarantees, and settings that the store found wrong, with every setting to change. The gravest comes first.
    pub findings: Vec<Finding>,
}

impl Profile {
    /// A profile with the guarantees that follow from these columns of the table of faults, and no feature yet.
    pub fn deployed(store: &str, deployments: Vec<Deployment>) -> Profile {
        let Guarantees { exclusion, fence, durable } = Guarantees::of(deployments.iter().copied());
        Profile { deployments, exclusion, fence, durable, ..Profile::undeclared(store) }
    }

    /// A profile that declares nothing: where the author of a store begins.
    pub fn undeclared(store: &str) -> Profile {
        Profile {
            store: store.into(),
            deployments: Vec::new(),
            exclusion: Guarantee::No,
            fence: Guarantee::No,
            durable: Guarantee::No,
            waiting: WaitOrder::Poll,
            wake: Duration::from_secs(1),
            shared: false,
            permits: false,
            multi_name: false,
            reentry: false,
            deadlocks: false,
            lock_delay: false,
            min_hold: false,
            watch: false,
            revoke: false,
            records: false,
            limits: LimitSupport::No,
            findings: Vec::new(),
        }
    }

    /// Refuses a request for a feature that this profile does not declare.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the feature.
    pub fn check_features(&self, request: &LockRequest) -> Result<()> {
        match request {
            LockRequest { mode: Mode::Shared, .. } if !self.shared => Err(self.lacks("shared locks")),
            LockRequest { mode: Mode::Permit(_), .. } if !self.permits => Err(self.lacks("permits")),
            LockRequest { owner: Some(_), .. } if !self.reentry => Err(self.lacks("re-entry")),
            _ if request.key.names.count() > 1 && !self.multi_name => {
                Err(self.lacks("requests for several names"))
            }
            _ if !request.lock_delay.is_zero() && !self.lock_delay => Err(self.lacks("lock-delay")),
            _ if !request.min_hold.is_zero() && !self.min_hold => Err(self.lacks("min-hold")),
            _ => Ok(()),
        }
    }

    /// The answer to a call for a feature that the store does not have. The call must change nothing.
    pub fn lacks(&self, feature: &str) -> Error {
        Error::Unsupported(format!("the {} store has no {feature}", self.store))
    }

    /// The findings on account of which the store may forget a grant or a fence, in one line.
    pub fn grave_findings(&self) -> String {
        let grave = |finding: &&Finding| {
            finding.severity < Severity::Hint
                && matches!(finding.promise, Promise::Fence | Promise::Durability)
        };
        let lines: Vec<String> = self.findings.iter().filter(grave).map(Finding::to_string).collect();
        lines.join("; ")
    }

    /// Whether the store may be used for `purpose`; if not, the reason and what to use instead.
    pub fn allows(&self, purpose: Purpose) -> Result<()> {
        let missing = match (purpose, self.fence, self.durable) {
            (Purpose::Efficiency, ..) | (_, Guarantee::Kept, Guarantee::Kept) => return Ok(()),
            (_, Guarantee::Kept, _) => "it can forget a grant when it crashes",
            _ => "its fences can go back when it crashes",
        };
        // Report every reason at once: an operator should not find them one by one.
        let why = self.grave_findings();
        let why = if why.is_empty() { why } else { format!(" ({why})") };
        Err(Error::Unsupported(format!(
            "the {} store, as it is, is not for correctness: {missing}{why}. Use sqlite:PATH on one host or etcd://HOSTS for \
             a fleet, or request for efficiency",
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
