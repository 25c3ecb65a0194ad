//! `lockkeeper partitions`: one command for each partition that this process owns, or one for all of them.

mod status;
mod together;
mod workers;

use std::time::Duration;

use clap::Args;
use lockkeeper::partitions::{PartitionChange, PartitionMember};
use lockkeeper::{LockName, Lockkeeper, Outcome};
use lockkeeper_core::assignment::{PARTITIONS_MAX, WEIGHT_MAX};
use rustix::process::Signal;
use serde_json::json;

use crate::args::{JobArgs, LeaseArgs, NameArgs, utf8};
use crate::child::registry;
use crate::exit::{self, ExitFailure};
use crate::report::Report;
use crate::signals::SignalStream;
use crate::store;
use together::{PartitionsFile, cannot};
use workers::{WorkerEnd, Workers};

/// How long the departure may take once all commands have ended after a signal. Without an answer of the store the others remove this
/// member after its ttl.
const DEPARTURE: Duration = Duration::from_secs(2);

/// Share partitions with other processes, and run a command for each partition that this process owns.
///
/// Every process that is started with the same group and the same --count owns its share of the partitions. A partition that moves to
/// another process is finished first: its command gets TERM, has --grace to end, and is killed then; only after that the other
/// process starts its own.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
#[command(mut_arg("command", |command| command.required(false).required_unless_present_any(["status", "of"])))]
#[command(mut_arg("grace", |grace| grace.default_value("10s").help(GRACE)))]
pub struct PartitionsArgs {
    #[command(flatten)]
    pub named: NameArgs,
    /// The number of partitions, 1 to 1024; the same everywhere
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(PARTITIONS_MAX)), allow_hyphen_values = true)]
    #[arg(required_unless_present_any = ["status", "of"])]
    pub count: Option<u32>,
    /// The name of this member: restarted within the ttl, it gets the same partitions [default: host name and random digits]
    #[arg(long, value_name = "NAME", value_parser = utf8("member"))]
    pub member: Option<String>,
    /// The share of this member, relative to the others
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=i64::from(WEIGHT_MAX)), allow_hyphen_values = true)]
    pub weight: u32,
    /// Run one command for all owned partitions, notified of changes by a file and HUP, instead of one for each
    #[arg(long, conflicts_with_all = ["status", "of"])]
    pub together: bool,
    /// Print the members, the owners of the partitions and what is moving instead
    #[arg(long, conflicts_with_all = ["of", "member", "command"])]
    pub status: bool,
    /// Print the partition of this key and its owner instead
    #[arg(long, value_name = "KEY", value_parser = utf8("key"), conflicts_with_all = ["member", "command"], allow_hyphen_values = true)]
    pub of: Option<String>,
    #[command(flatten)]
    pub lease: LeaseArgs,
    #[command(flatten)]
    pub job: JobArgs,
}

const GRACE: &str = "Time between TERM and KILL when a partition is given up; if its lock is about to be lost, at most a quarter of the ttl";

const EXAMPLES: &str = "\
Examples:
  lockkeeper partitions orders --count 32 -- ./worker.sh         on every host; each owns its share
  lockkeeper partitions orders --count 32 --member w1 -- ./worker.sh
                                                                 a restart keeps the same partitions
  lockkeeper partitions orders --count 32 --together -- ./service
                                                                 one command for all of its share
  lockkeeper partitions orders --status                          members, owners, what is moving
  lockkeeper partitions orders --of order-4711                   the partition of a key, and its owner

The command gets LOCKKEEPER_PARTITION (0 to N-1), LOCKKEEPER_PARTITIONS (N), LOCKKEEPER_FENCE (the
partition's epoch, a fencing token) and the other variables of `run`. It works on the keys of its
partition: the first four bytes of SHA-256 of the key, as a big-endian number, modulo N.
A command that ends by itself, also with 0, ends the membership: the other commands get TERM, and
its exit code is that of the whole call.

With --together the command gets LOCKKEEPER_PARTITIONS and LOCKKEEPER_PARTITIONS_FILE instead: the
path of a JSON file, replaced at each change, with the number and the fence of each partition.
It gets HUP after each change, once it catches HUP. A partition that moves is in `leaving`: the
command finishes it and creates the file named in its `done`. A command that has not done so when
--grace is over, or whose lock is lost, gets TERM, then KILL, and is started again with the rest.

Exit codes: that of the command that ended by itself, 128+n after a signal; 76 another process has
joined with the same --member, or the group was made anew with another count; 64 bad call, or the
group has another count; 66 no member has joined the group, so that --of needs --count; 69 the
store is unreachable at the start, 78 it has no records.";

impl PartitionsArgs {
    fn group(&self) -> &LockName {
        self.named.get()
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        if self.status || self.of.is_some() {
            let keeper = self.job.common.open().await?;
            return status::print(&self, &keeper).await;
        }
        let report = self.job.report(std::iter::once(self.group()));
        self.job.check()?;
        let source = self.job.common.source()?;
        store::warn_of_one_host(&source, &report);
        let keeper = Lockkeeper::open(source.url.expose()).await?;
        // Made before the join: a call that cannot have it leaves no member behind.
        let file = self.together.then(PartitionsFile::create).transpose().map_err(|e| cannot(&self, &e))?;
        if file.is_none() {
            registry::expect_several();
        }
        let mut signals = SignalStream::forwarded_to_several()?;
        let member = match signals.race(self.join(&keeper)).await {
            Ok(joined) => joined?,
            Err(signal) => return Ok(signals.flush_releases(&keeper, signal).await),
        };
        report.event("joined", json!({ "member": member.name(), "count": self.count }));
        report.say(&format!("joined {} as {}", report.what(), member.name()));
        let (code, asked) = match file {
            Some(file) => together::work(&self, &source, file, member, &mut signals, &report).await?,
            None => {
                let workers = Workers::new(&self, &source, &report);
                self.work(member, workers, &mut signals, &report).await?
            }
        };
        report.event("left", json!({ "exit_code": code }));
        match asked {
            Some(signal) => Ok(signals.flush_releases(&keeper, signal).await),
            None => Ok(code),
        }
    }

    async fn join(&self, keeper: &Lockkeeper) -> lockkeeper::Result<PartitionMember> {
        let mut partitions = keeper
            .partitions(self.group().as_str(), self.count.unwrap_or_default())
            .weight(self.weight)
            .ttl(self.lease.ttl)
            .grace(self.job.grace);
        if let Some(member) = &self.member {
            partitions = partitions.member(member);
        }
        if self.lease.correctness {
            partitions = partitions.for_correctness();
        }
        partitions.join().await
    }

    /// Runs commands until this process has left the group. Returns the exit code, and the signal that ended the membership.
    async fn work(
        &self,
        mut member: PartitionMember,
        mut workers: Workers<'_>,
        signals: &mut SignalStream,
        report: &Report,
    ) -> Result<(i32, Option<Signal>), ExitFailure> {
        let (mut joined, mut asked, mut code) = (true, None, None);
        let mut failure = None;
        while joined || !workers.is_empty() {
            tokio::select! {
                biased;
                signal = signals.next_ending() => {
                    // Each command gets the signal from its own supervisor.
                    if is_ending(signal) {
                        asked.get_or_insert(signal);
                        member.start_leaving();
                    }
                }
                end = workers.next_end(), if !workers.is_empty() => match end {
                    WorkerEnd::GivenUp => {}
                    WorkerEnd::Itself(ended) => {
                        code.get_or_insert(ended);
                        member.start_leaving();
                    }
                    WorkerEnd::Failed(failed) => {
                        failure.get_or_insert(failed);
                        member.start_leaving();
                    }
                },
                change = member.next(), if joined => match change {
                    Some(Ok(PartitionChange::Owned(partition))) => workers.start(partition)?,
                    Some(Ok(PartitionChange::Revoked { number, fence })) => {
                        workers::report_revoked(report, number, fence);
                    }
                    Some(Err(error)) => _ = failure.get_or_insert(error.into()),
                    None => joined = false,
                },
                // Whatever the store does, nothing is left to wait for.
                () = tokio::time::sleep(DEPARTURE), if asked.is_some() && workers.is_empty() => joined = false,
            }
        }
        exit_of(asked, code, failure)
    }
}

/// The result of the call: a signal counts before the command's own end, and that before a failure.
fn exit_of(
    asked: Option<Signal>,
    code: Option<i32>,
    failure: Option<ExitFailure>,
) -> Result<(i32, Option<Signal>), ExitFailure> {
    match (asked, code, failure) {
        (Some(signal), ..) => Ok((exit::by_signal(signal.as_raw()), Some(signal))),
        (None, Some(code), _) => Ok((code, None)),
        (None, None, Some(failure)) => Err(failure),
        (None, None, None) => Err(ExitFailure::new(Outcome::Lost, "the membership has ended")),
    }
}

/// Whether the signal ends this process; USR1 and USR2 are for the commands. HUP is an end here, as for every program whose terminal
/// has gone, also with --together: there the command gets TERM for it, because HUP means to it that the file has changed.
fn is_ending(signal: Signal) -> bool {
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT].contains(&signal)
}
