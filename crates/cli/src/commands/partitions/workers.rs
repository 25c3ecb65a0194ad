//! The commands of the owned partitions, each under the lock of its partition.

use std::future::Future;
use std::pin::Pin;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper::partitions::Partition;
use lockkeeper::{Fence, ReleaseOutcome};
use serde_json::json;

use super::PartitionsArgs;
use crate::child::supervisor::CommandEnd;
use crate::exit::ExitFailure;
use crate::report::Report;
use crate::signals::SignalStream;
use crate::store::StoreSource;

/// How the command of a partition ended.
pub enum WorkerEnd {
    /// Its partition was given up or lost. If the group still assigns it to this process, it comes back.
    GivenUp,
    /// By itself, with this exit code.
    Itself(i32),
    /// It could not be started.
    Failed(ExitFailure),
}

/// The commands that run.
pub struct Workers<'a> {
    args: &'a PartitionsArgs,
    source: &'a StoreSource,
    report: &'a Report,
    running: FuturesUnordered<Pin<Box<dyn Future<Output = WorkerEnd> + 'a>>>,
}

impl<'a> Workers<'a> {
    pub fn new(args: &'a PartitionsArgs, source: &'a StoreSource, report: &'a Report) -> Self {
        Workers { args, source, report, running: FuturesUnordered::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// The next command that has ended. Pending if none runs.
    pub async fn next_end(&mut self) -> WorkerEnd {
        match self.running.next().await {
            Some(end) => end,
            None => std::future::pending().await,
        }
    }

    /// Starts the command of a partition.
    pub fn start(&mut self, partition: Partition) -> Result<(), ExitFailure> {
        // Each supervisor passes the signals on to its own command.
        let signals = SignalStream::forwarded_to_several()?;
        self.running.push(Box::pin(run(self.args, self.source, self.report, partition, signals)));
        Ok(())
    }
}

async fn run(
    args: &PartitionsArgs,
    source: &StoreSource,
    group: &Report,
    partition: Partition,
    mut signals: SignalStream,
) -> WorkerEnd {
    let (number, fence, count) = (partition.number(), partition.fence(), partition.count());
    // Revoked before its command was started.
    if partition.is_revoked() {
        return WorkerEnd::GivenUp;
    }
    report_owned(group, &partition);
    let lock = partition.guard().names().first().clone();
    let env = [("LOCKKEEPER_PARTITION", number.to_string()), ("LOCKKEEPER_PARTITIONS", count.to_string())];
    let mut job = args.job.job(&lock, source, env);
    job.finish = Some(Box::pin(partition.revoked()));
    let report = args.job.report(std::iter::once(&lock));
    let end = match job.supervise(partition.guard(), &mut signals, &report).await {
        Ok(end) => end,
        Err(failure) => return WorkerEnd::Failed(failure),
    };
    let revoked = partition.is_revoked();
    match end {
        CommandEnd::Itself { code, .. } => {
            release(group, partition).await;
            if revoked { WorkerEnd::GivenUp } else { WorkerEnd::Itself(code) }
        }
        CommandEnd::Lost { why, all_gone, .. } => {
            group.event("lost", json!({ "partition": number, "fence": fence, "why": why }));
            if !all_gone {
                group.say(&format!(
                    "warning: some processes of the command could not be killed: partition {number} is not released, and is free when its \
                     lease is over"
                ));
                partition.let_expire();
            }
            WorkerEnd::GivenUp
        }
    }
}

/// Reports that this process owns the partition now.
pub fn report_owned(group: &Report, partition: &Partition) {
    let (number, fence) = (partition.number(), partition.fence());
    group.event("owned", json!({ "partition": number, "fence": fence }));
    group.say(&format!("owning partition {number} of {}, fence {fence}", group.what()));
}

/// Reports that the group wants the partition back.
pub fn report_revoked(group: &Report, number: u32, fence: Fence) {
    group.event("revoked", json!({ "partition": number, "fence": fence }));
    group.say(&format!("giving up partition {number} of {}", group.what()));
}

/// Releases the partition, so that its next owner starts at once.
pub async fn release(group: &Report, partition: Partition) {
    let (number, fence) = (partition.number(), partition.fence());
    match partition.release().await {
        Ok(ReleaseOutcome::Released) => {
            group.event("released", json!({ "partition": number, "fence": fence }))
        }
        Ok(ReleaseOutcome::AlreadyGone) => {}
        Err(error) => group.say(&format!(
            "warning: partition {number} could not be released ({error}); it is free when its ttl is over"
        )),
    }
}
