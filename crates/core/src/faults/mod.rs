//! The faults that Lockkeeper is tested with, and the declared behaviour of every store under each of them: one table, from which the
//! profiles of the stores, `docs/RELIABILITY.md` and `lockkeeper doctor` come. The test kit's program `torture` injects the faults.

mod deployment;
mod table;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use deployment::Deployment;

use crate::Guarantee;

/// A fault: one row of the table. The numbers are those of `docs/RELIABILITY.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
#[allow(missing_docs, reason = "FaultKind::text has the sentence for each")]
pub enum FaultKind {
    HolderKilled = 1,
    HolderStopped,
    RuntimeStarved,
    HolderCutOff,
    OneWayCut,
    SlowNetwork,
    StoreKilled,
    PowerCut,
    FailOver,
    StoreClockForward,
    StoreClockBack,
    ClientClock,
    DiskFull,
    SyncFails,
    SlowDisk,
    ReplyLost,
    LateReplies,
    ManyWaiters,
    ManyLocks,
    MemoryLimit,
    MalformedReplies,
    DataDeleted,
}

impl FaultKind {
    /// All rows, in order.
    pub const ALL: [FaultKind; 22] = {
        use FaultKind::*;
        [
            HolderKilled,
            HolderStopped,
            RuntimeStarved,
            HolderCutOff,
            OneWayCut,
            SlowNetwork,
            StoreKilled,
            PowerCut,
            FailOver,
            StoreClockForward,
            StoreClockBack,
            ClientClock,
            DiskFull,
            SyncFails,
            SlowDisk,
            ReplyLost,
            LateReplies,
            ManyWaiters,
            ManyLocks,
            MemoryLimit,
            MalformedReplies,
            DataDeleted,
        ]
    };

    /// The number of the row.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The row with this number.
    pub fn of_number(number: u8) -> Option<FaultKind> {
        FaultKind::ALL.into_iter().find(|fault| fault.number() == number)
    }

    /// The fault in words.
    pub fn text(self) -> &'static str {
        match self {
            FaultKind::HolderKilled => "a holder is killed (SIGKILL)",
            FaultKind::HolderStopped => {
                "a holder is stopped for longer than its ttl (SIGSTOP), then continues"
            }
            FaultKind::RuntimeStarved => "the runtime of a holder is blocked for longer than its ttl",
            FaultKind::HolderCutOff => "a holder is cut off from the store, both ways",
            FaultKind::OneWayCut => "a holder is cut off from the store, one way",
            FaultKind::SlowNetwork => "the network delays messages by 100 ms, and some of them by 3 s",
            FaultKind::StoreKilled => "the server is killed (SIGKILL) and starts again",
            FaultKind::PowerCut => "the power of the server's host is cut: unsynced data is lost",
            FaultKind::FailOver => "the leader fails, and another server takes over",
            FaultKind::StoreClockForward => "the wall clock of the server is set forward by an hour",
            FaultKind::StoreClockBack => "the wall clock of the server is set back by an hour",
            FaultKind::ClientClock => "the clocks of the clients differ by an hour",
            FaultKind::DiskFull => "the disk of the server is full",
            FaultKind::SyncFails => "the disk of the server fails to sync (EIO)",
            FaultKind::SlowDisk => "the disk of the server takes seconds to sync",
            FaultKind::ReplyLost => "the connection is reset before the reply: the outcome is unknown",
            FaultKind::LateReplies => "requests and replies arrive after the client has given them up",
            FaultKind::ManyWaiters => "many waiters want one lock",
            FaultKind::ManyLocks => "many locks are held, and all expire together",
            FaultKind::MemoryLimit => "the server reaches its memory limit",
            FaultKind::MalformedReplies => "the server's replies are garbage",
            FaultKind::DataDeleted => "an operator deletes the data of the store",
        }
    }
}

/// Whether exclusion holds under a fault: at most one holder of a lock believes to hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exclusion {
    /// Always.
    Kept,
    /// While the clocks of holder and store run at the same rate, within the margin.
    WhileRatesAgree,
    /// Two holders are possible. Only the fence protects the resource.
    CanBreak,
}

/// How long a waiter may wait for a lock whose holder is gone, counted from the end of the outage of the store, if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WaitBound {
    /// [`crate::Profile::wake`].
    Wake,
    /// The lease of the holder, then [`crate::Profile::wake`].
    Lease,
    /// Two leases, then [`crate::Profile::wake`].
    TwoLeases,
}

impl WaitBound {
    /// The longest wait, for a lock of this ttl in a store with this [`crate::Profile::wake`].
    pub fn longest(self, deployment: Deployment, ttl: Duration, wake: Duration) -> Duration {
        let lease = deployment.longest_lease(ttl);
        match self {
            WaitBound::Wake => wake,
            WaitBound::Lease => lease + wake,
            WaitBound::TwoLeases => lease * 2 + wake,
        }
    }
}

/// The declared behaviour of a store under a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Expectation {
    /// X: one holder at a time.
    pub exclusion: Exclusion,
    /// F: fences grow from grant to grant.
    pub fence: Guarantee,
    /// A grant that was reported is not forgotten.
    pub durable: Guarantee,
    /// W: the bound for the next waiter.
    pub wait: WaitBound,
}

/// One cell of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultCell {
    /// The store keeps this.
    Declared(Expectation),
    /// The fault cannot happen to this store; why.
    NotApplicable(&'static str),
}

impl FaultCell {
    /// The declared behaviour, if the fault can happen.
    pub fn declared(self) -> Option<Expectation> {
        match self {
            FaultCell::Declared(expected) => Some(expected),
            FaultCell::NotApplicable(_) => None,
        }
    }
}

/// The guarantees of a profile that follow from the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Guarantees {
    /// [`crate::Profile::exclusion`].
    pub exclusion: Guarantee,
    /// [`crate::Profile::fence`].
    pub fence: Guarantee,
    /// [`crate::Profile::durable`].
    pub durable: Guarantee,
}

impl Guarantees {
    /// The weakest that any of these columns has under any fault. A store that is deployed in two ways at once, for instance with a
    /// replica and without an append-only file, has the weaknesses of both.
    ///
    /// [`FaultKind::DataDeleted`] does not count: no store keeps a lock that its operator deletes.
    pub fn of(deployments: impl IntoIterator<Item = Deployment>) -> Guarantees {
        let mut deployments = deployments.into_iter().peekable();
        // A store outside of the table has to earn its guarantees by itself.
        let best = if deployments.peek().is_some() { Guarantee::Kept } else { Guarantee::No };
        let best = Guarantees { exclusion: best, fence: best, durable: best };
        let cells = deployments.flat_map(|deployment| {
            let faults = FaultKind::ALL.into_iter().filter(|fault| *fault != FaultKind::DataDeleted);
            faults.filter_map(move |fault| deployment.cell(fault).declared())
        });
        cells.fold(best, |all, cell| {
            let exclusion = match cell.exclusion {
                Exclusion::CanBreak => Guarantee::Likely,
                Exclusion::Kept | Exclusion::WhileRatesAgree => Guarantee::Kept,
            };
            Guarantees {
                exclusion: all.exclusion.weaker(exclusion),
                fence: all.fence.weaker(cell.fence),
                durable: all.durable.weaker(cell.durable),
            }
        })
    }
}
