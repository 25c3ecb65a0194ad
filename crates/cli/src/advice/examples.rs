//! The worked examples: eight well-known situations. docs/guide/choosing.md is made from them.

use std::time::Duration;

use lockkeeper::Purpose;

use super::{ConflictRate, HostCount, ResourceKind, RunningSystem, Situation};

/// A situation with a name and a story.
pub struct WorkedExample {
    pub title: &'static str,
    pub story: &'static str,
    pub purpose: Purpose,
    pub resource: ResourceKind,
    pub running: &'static [RunningSystem],
    pub work: Duration,
    pub conflicts: ConflictRate,
}

impl WorkedExample {
    /// The six answers. All examples run on many hosts.
    pub fn situation(&self) -> Situation {
        Situation {
            purpose: self.purpose,
            resource: self.resource,
            running: self.running.to_vec(),
            work: self.work,
            conflicts: self.conflicts,
            hosts: HostCount::Many,
        }
    }
}

/// The eight examples.
pub const EXAMPLES: [WorkedExample; 8] = [
    WorkedExample {
        title: "Cache stampede guard",
        story: "A report takes two seconds to compute. It expires, and 200 instances want it at once.",
        purpose: Purpose::Efficiency,
        resource: ResourceKind::Cache,
        running: &[RunningSystem::Redis],
        work: Duration::from_secs(2),
        conflicts: ConflictRate::Often,
    },
    WorkedExample {
        title: "Seat checkout",
        story: "A buyer chooses a seat and has ten minutes to pay. No seat may be sold twice.",
        purpose: Purpose::Correctness,
        resource: ResourceKind::Row,
        running: &[RunningSystem::Postgres, RunningSystem::Redis],
        work: Duration::from_secs(600),
        conflicts: ConflictRate::Often,
    },
    WorkedExample {
        title: "Nightly billing",
        story: "Twelve hosts have the same crontab. One of them makes the invoices, once per night.",
        purpose: Purpose::Correctness,
        resource: ResourceKind::Job,
        running: &[RunningSystem::Postgres],
        work: Duration::from_secs(2 * 60 * 60),
        conflicts: ConflictRate::Rarely,
    },
    WorkedExample {
        title: "One scheduler per cluster",
        story: "Three hosts run a scheduler. One of them plans, the others take over when it dies.",
        purpose: Purpose::Correctness,
        resource: ResourceKind::Service,
        running: &[RunningSystem::Etcd],
        work: Duration::from_secs(24 * 60 * 60),
        conflicts: ConflictRate::Rarely,
    },
    WorkedExample {
        title: "Rate limit",
        story: "Forty instances call an API that allows 100 requests per second.",
        purpose: Purpose::Efficiency,
        resource: ResourceKind::Rate,
        running: &[RunningSystem::Redis],
        work: Duration::from_millis(100),
        conflicts: ConflictRate::Often,
    },
    WorkedExample {
        title: "Payment refund",
        story: "A refund is requested by a form, a job and a support tool. The customer must get the money once.",
        purpose: Purpose::Correctness,
        resource: ResourceKind::Call,
        running: &[RunningSystem::Postgres],
        work: Duration::from_secs(5),
        conflicts: ConflictRate::Rarely,
    },
    WorkedExample {
        title: "Profile updates",
        story: "A user changes the profile in two browser tabs. No change may be lost silently.",
        purpose: Purpose::Correctness,
        resource: ResourceKind::Row,
        running: &[RunningSystem::Postgres],
        work: Duration::from_millis(50),
        conflicts: ConflictRate::Rarely,
    },
    WorkedExample {
        title: "Inventory reservation",
        story: "Many orders take from the same stock at once. It must not go below zero.",
        purpose: Purpose::Correctness,
        resource: ResourceKind::Stock,
        running: &[RunningSystem::Postgres],
        work: Duration::from_millis(20),
        conflicts: ConflictRate::Often,
    },
];
