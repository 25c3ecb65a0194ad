//! One file per scenario: its story, its director, its workers, and the numbers that it counts.

mod bucket_or_lock;
mod cas_or_lock;
mod contention;
mod costume;
mod crash;
mod cron;
mod deadlock;
mod failover;
mod gc;
mod heartbeat;
mod late_writer;
mod no_ttl;
mod overrun;
mod partition;
mod partitioned;
mod pause;
mod redlock;
mod stampede;
mod unchecked_release;

use crate::scenario::Scenario;

/// All scenarios, in the order of the page.
pub const ALL: &[Scenario] = &[
    pause::SCENARIO,
    crash::SCENARIO,
    overrun::SCENARIO,
    unchecked_release::SCENARIO,
    no_ttl::SCENARIO,
    cron::SCENARIO,
    stampede::SCENARIO,
    deadlock::SCENARIO,
    contention::SCENARIO,
    failover::SCENARIO,
    redlock::SCENARIO,
    partition::SCENARIO,
    gc::SCENARIO,
    cas_or_lock::SCENARIO,
    bucket_or_lock::SCENARIO,
    partitioned::SCENARIO,
    heartbeat::SCENARIO,
    costume::SCENARIO,
];
