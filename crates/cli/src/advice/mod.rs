//! Advice: which mechanism fits a situation, often none of the locks; which store, which ttl, what to paste, and the risk that stays. It is
//! a pure function of six answers over the table in [`rules`].

mod examples;
mod output;
mod rules;
mod stores;
mod ttl;

use std::time::Duration;

use clap::ValueEnum;
use lockkeeper::Purpose;

pub use output::{page, print};
use rules::AdviceRule;
use stores::StoreAdvice;
use ttl::TtlAdvice;

/// The thing that the mechanism protects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ResourceKind {
    /// A value that is costly to compute and may be a little old
    Cache,
    /// A row of a SQL database
    Row,
    /// A number in a SQL database that must not go below zero, such as stock
    Stock,
    /// A job that runs at certain times
    Job,
    /// A program of which one copy runs all the time
    Service,
    /// How often something may happen
    Rate,
    /// A call to another system that must have its effect once
    Call,
    /// A list of items to work on
    Items,
    /// A small value that many processes change
    Value,
    /// A file
    File,
    /// A machine, a device or a system that checks nothing
    Device,
}

/// A system that runs already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RunningSystem {
    /// PostgreSQL
    Postgres,
    /// Redis
    Redis,
    /// etcd
    Etcd,
    /// ZooKeeper
    Zookeeper,
    /// An account of AWS
    Aws,
    /// None of these
    Nothing,
}

/// How often two processes want the same thing at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConflictRate {
    /// Less than once in a hundred times
    Rarely,
    /// More often than that
    Often,
}

/// On how many hosts the processes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HostCount {
    /// On one
    One,
    /// On several
    Many,
}

/// The six answers.
#[derive(Clone, Debug)]
pub struct Situation {
    pub purpose: Purpose,
    pub resource: ResourceKind,
    pub running: Vec<RunningSystem>,
    pub work: Duration,
    pub conflicts: ConflictRate,
    pub hosts: HostCount,
}

/// The advice for a situation.
#[derive(Clone, Debug)]
pub struct Advice {
    pub rule: &'static AdviceRule,
    pub store: StoreAdvice,
    pub ttl: TtlAdvice,
}

/// The advice for a situation. Every situation has one.
pub fn advise(situation: &Situation) -> Advice {
    let rule = rules::find(situation);
    Advice {
        rule,
        store: stores::choose(rule.keeps, situation),
        ttl: ttl::choose(rule.lease, situation.work),
    }
}

#[cfg(test)]
mod tests;
