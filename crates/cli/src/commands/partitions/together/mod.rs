//! `lockkeeper partitions --together`: one command for all owned partitions, notified of changes by a file and SIGHUP.

mod file;
mod owned;

use std::collections::BTreeSet;
use std::pin::Pin;
use std::rc::Rc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper::Outcome;
use lockkeeper::partitions::{Partition, PartitionChange, PartitionMember};
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::watch;

use super::{DEPARTURE, PartitionsArgs, exit_of, is_ending, workers};
use crate::child::CommandProcess;
use crate::child::lease::CommandLease;
use crate::child::supervisor::{self, CommandEnd, LeadTimes, Supervisor};
use crate::exit::{self, ExitFailure};
use crate::message_writer;
use crate::report::{Report, millis};
use crate::signals::SignalStream;
use crate::store::StoreSource;
use crate::text::plain;
pub use file::PartitionsFile;
use owned::{OwnedPartitions, Tenure};

/// The variable with the path of the file.
pub const FILE: &str = "LOCKKEEPER_PARTITIONS_FILE";

type RunningCommand<'a> = Pin<Box<dyn Future<Output = Result<CommandEnd, ExitFailure>> + 'a>>;
type Releases<'a> = FuturesUnordered<Pin<Box<dyn Future<Output = ()> + 'a>>>;

/// The state that the end of the membership depends on.
struct Membership<'a> {
    report: &'a Report,
    member: PartitionMember,
    owned: &'a OwnedPartitions,
    releases: Releases<'a>,
    /// Whether the member still has changes.
    joined: bool,
    /// True once the command has to end.
    ending: watch::Sender<bool>,
    asked: Option<Signal>,
    code: Option<i32>,
    failure: Option<ExitFailure>,
}

/// Runs the command until this process has left the group. Returns the exit code, and the signal that ended the membership.
pub async fn work(
    args: &PartitionsArgs,
    source: &StoreSource,
    file: PartitionsFile,
    member: PartitionMember,
    signals: &mut SignalStream,
    report: &Report,
) -> Result<(i32, Option<Signal>), ExitFailure> {
    let (count, ttl, grace) = (args.count.unwrap_or_default(), args.lease.ttl, args.job.grace);
    let owned = OwnedPartitions::new(args.group(), member.name(), file, count, ttl, grace);
    let ending = watch::Sender::new(false);
    let end_requested = ending.subscribe();
    let mut membership = Membership {
        report,
        member,
        owned: &owned,
        releases: FuturesUnordered::new(),
        joined: true,
        ending,
        asked: None,
        code: None,
        failure: None,
    };
    let mut command: Option<RunningCommand<'_>> = None;
    while membership.joined || command.is_some() || !membership.releases.is_empty() {
        if command.is_none() && !membership.is_ending() && membership.may_start() {
            command = Some(Box::pin(run(args, source, &owned, report, end_requested.clone())));
        }
        if let Some(end) = membership.step(&mut command, signals).await {
            command = None;
            membership.handle_end(end)?;
        }
    }
    exit_of(membership.asked, membership.code, membership.failure)
}

impl Membership<'_> {
    fn is_ending(&self) -> bool {
        *self.ending.borrow()
    }

    /// Whether there are partitions to start the command for.
    fn may_start(&mut self) -> bool {
        // While no command runs, every partition that is lost or leaves is finished.
        self.give_up_lost();
        self.owned.leaving().into_iter().for_each(|tenure| self.release(tenure));
        !self.owned.is_empty()
    }

    /// Waits for the next event, and handles it. Returns how the command ended, if it did.
    async fn step(
        &mut self,
        command: &mut Option<RunningCommand<'_>>,
        signals: &mut SignalStream,
    ) -> Option<Result<CommandEnd, ExitFailure>> {
        let runs = command.is_some();
        let idle = self.asked.is_some() && !runs && self.releases.is_empty();
        tokio::select! {
            biased;
            signal = signals.next_ending() => {
                // The supervisor passes the others on.
                if is_ending(signal) {
                    self.asked.get_or_insert(signal);
                    self.end();
                }
            }
            end = async { command.as_mut().expect("it runs").await }, if runs => return Some(end),
            done = self.owned.finished(), if runs => done.into_iter().for_each(|tenure| self.release(tenure)),
            Some(()) = self.releases.next() => {}
            change = self.member.next(), if self.joined => match change {
                Some(Ok(change)) => self.follow(change),
                Some(Err(error)) => _ = self.failure.get_or_insert(error.into()),
                None => {
                    self.joined = false;
                    self.end();
                }
            },
            () = tokio::time::sleep(DEPARTURE), if idle => self.joined = false,
        }
        None
    }

    fn follow(&mut self, change: PartitionChange) {
        match change {
            PartitionChange::Owned(partition) if self.is_ending() || partition.is_revoked() => {
                drop(partition)
            }
            PartitionChange::Owned(partition) => {
                workers::report_owned(self.report, &partition);
                self.owned.insert(partition);
            }
            PartitionChange::Revoked { number, fence } => {
                workers::report_revoked(self.report, number, fence);
                self.owned.leave((number, fence));
            }
        }
    }

    /// Ends the membership, and the command with it.
    fn end(&mut self) {
        self.member.start_leaving();
        if !self.ending.send_replace(true) {
            self.owned.end_after_grace();
        }
    }

    fn handle_end(&mut self, end: Result<CommandEnd, ExitFailure>) -> Result<(), ExitFailure> {
        match end {
            Ok(CommandEnd::Lost { why, all_gone: false, .. }) => {
                // Processes that live on may still work on every partition: none is released before its lease is over.
                let owned = self.owned;
                owned
                    .tenures()
                    .into_iter()
                    .filter_map(|tenure| owned.remove(tenure))
                    .for_each(std::mem::forget);
                let message = format!(
                    "a partition was lost ({why}), and some processes of the command could not be killed"
                );
                return Err(ExitFailure::new(Outcome::Lost, message));
            }
            // Only what was lost is given up: the command is started again with the others.
            Ok(CommandEnd::Lost { .. }) => self.give_up_lost(),
            Ok(CommandEnd::Itself { code, .. }) => {
                self.code.get_or_insert(code);
                self.end();
            }
            Err(failure) => {
                self.failure.get_or_insert(failure);
                self.end();
            }
        }
        if self.is_ending() {
            self.owned.tenures().into_iter().for_each(|tenure| self.release(tenure));
        }
        Ok(())
    }

    /// Drops the partitions that are lost. No command works on them.
    fn give_up_lost(&mut self) {
        for ((number, fence), why) in self.owned.lost() {
            self.report.event("lost", json!({ "partition": number, "fence": fence, "why": why }));
            drop(self.owned.remove((number, fence)));
        }
    }

    /// Releases a partition that the command has finished.
    fn release(&mut self, tenure: Tenure) {
        let Some(partition) = self.owned.remove(tenure) else { return };
        let report = self.report;
        self.releases.push(Box::pin(async move { workers::release(report, only(partition).await).await }));
    }
}

/// The partition itself: the supervisor has a reference until it has seen that the partition was taken out.
async fn only(mut partition: Rc<Partition>) -> Partition {
    loop {
        match Rc::try_unwrap(partition) {
            Ok(partition) => return partition,
            Err(shared) => partition = shared,
        }
        tokio::task::yield_now().await;
    }
}

/// Runs the command once, until it ends or has been ended because a partition was lost.
async fn run(
    args: &PartitionsArgs,
    source: &StoreSource,
    owned: &OwnedPartitions,
    report: &Report,
    mut ending: watch::Receiver<bool>,
) -> Result<CommandEnd, ExitFailure> {
    let cannot = |e: std::io::Error| cannot(args, &e);
    let changes = supervisor::changes().map_err(cannot)?;
    let mut signals = SignalStream::forwarded_to_several()?.without(Signal::HUP);
    owned.prepare().map_err(cannot)?;
    let mut env = vec![
        ("LOCKKEEPER_PARTITIONS", args.count.map(|count| count.to_string())),
        (FILE, Some(owned.file.path())),
        ("LOCKKEEPER_TTL_MS", Some(millis(args.lease.ttl).to_string())),
    ];
    // The variables of a caller: each partition has a fence of its own, in the file.
    let single = ["LOCKKEEPER_NAME", "LOCKKEEPER_FENCE", "LOCKKEEPER_SEQUENCER", "LOCKKEEPER_PARTITION"];
    env.extend(single.map(|name| (name, None)));
    env.extend(source.environment(args.job.hide_store));
    message_writer::STDERR.flush(message_writer::SHORT_FLUSH);
    let mut watchdog = owned.start_watchdog().map_err(cannot)?;
    let leads = LeadTimes::new(args.job.grace, owned.lease(), None);
    watchdog.send_deadline(owned.deadline().before(leads.watchdog));
    let child =
        CommandProcess::start(&args.job.command, &env, None, watchdog, report.is_json()).map_err(cannot)?;
    let numbers: BTreeSet<u32> = owned.tenures().into_iter().map(|(number, _)| number).collect();
    report.event("started", json!({ "partitions": numbers }));
    let finish = Box::pin(async move { _ = ending.wait_for(|ending| *ending).await });
    let report_loss =
        |why: &str| report.say(&format!("losing partitions of {}: {why}. Ending the command", report.what()));
    let watch = Supervisor::new(child, changes, owned, args.job.grace, None).until(Some(finish));
    Ok(watch.until_end(&mut signals, report_loss).await)
}

/// The failure of a command that cannot be started.
pub fn cannot(args: &PartitionsArgs, e: &std::io::Error) -> ExitFailure {
    let message = format!("{} cannot be started: {e}", plain(&args.job.command[0].to_string_lossy()));
    ExitFailure::new(Outcome::Unavailable, message).with_code(exit::CANNOT_START)
}
