//! One file per subcommand, and the one place that picks among them.

pub mod advise;
pub mod break_lock;
pub mod cached;
pub mod claim;
pub mod completions;
pub mod cron;
pub mod doctor;
pub mod elect;
pub mod fence;
pub mod fence_check;
#[cfg(feature = "postgres")]
pub mod fence_table;
pub mod fenced_write;
#[cfg(feature = "gate")]
pub mod gate;
pub mod hold;
#[cfg(feature = "postgres")]
pub mod jobs;
#[cfg(feature = "lab")]
pub mod lab;
pub mod limit;
pub mod ls;
pub mod man;
pub mod metrics;
pub mod once;
pub mod partitions;
pub mod record;
pub mod run;
pub mod show;
pub mod status;
pub mod store;
#[cfg(feature = "verify")]
pub mod verify;
pub mod watch;

use std::future::Future;

use clap::Subcommand;
use lockkeeper::LockName;

use crate::exit::{ExitFailure, OK};
use crate::text::shell;
use crate::{log, signals};

/// Every subcommand.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Run a command under a lock
    Run(Box<run::RunArgs>),
    /// Hold a lock until stdin closes or a signal arrives
    Hold(Box<hold::HoldArgs>),
    /// List the locks that are held or waited for
    Ls(ls::LsArgs),
    /// Show everything about one lock
    Show(show::ShowArgs),
    /// Say whether a job of `run --window` or `cron` runs as it should
    Status(status::StatusArgs),
    /// Print the events of locks as they happen
    Watch(watch::WatchArgs),
    /// Print the numbers of a store for Prometheus, or serve them
    Metrics(metrics::MetricsArgs),
    /// Examine a store: one verdict for each promise, and every setting to change
    Doctor(doctor::DoctorArgs),
    /// Say what to use for a task: a lock or something better, which store, which ttl
    Advise(advise::AdviseArgs),
    /// Take a lock away from its holder
    Break(break_lock::BreakArgs),
    /// Run a command on a schedule, each time on one of many hosts
    Cron(Box<cron::CronArgs>),
    /// Run a command while this process is the leader
    Elect(Box<elect::ElectArgs>),
    /// Run a command once; later calls get the same output and exit code
    Once(Box<once::OnceArgs>),
    /// Run a command for each item of a list, shared with workers on other hosts
    Claim(Box<claim::ClaimArgs>),
    /// Let many workers share the rows of a PostgreSQL table
    #[cfg(feature = "postgres")]
    Jobs(jobs::JobsArgs),
    /// Print the output of a command from the cache; one caller runs the command when it is due
    Cached(Box<cached::CachedArgs>),
    /// Share partitions among processes; run a command for each owned one
    Partitions(Box<partitions::PartitionsArgs>),
    /// Take tokens of a rate limit that all processes share
    Limit(Box<limit::LimitArgs>),
    /// Keep small values that many processes change
    Record(record::RecordArgs),
    /// Set up a store
    Store(store::StoreArgs),
    /// Check that a store keeps its promises, with names of its own
    #[cfg(feature = "verify")]
    Verify(verify::VerifyArgs),
    /// Check fences (fencing tokens): of a grant, or in a database table that refuses late writers
    Fence(fence::FenceArgs),
    /// Check fences in front of an HTTP service that cannot be changed
    #[cfg(feature = "gate")]
    Gate(Box<gate::GateArgs>),
    /// Replace a file, unless a newer fence has written it
    FencedWrite(fenced_write::FencedWriteArgs),
    /// Watch locks fail, and hold, with real processes
    #[cfg(feature = "lab")]
    Lab(lab::LabArgs),
    /// Print shell completions
    Completions(completions::CompletionsArgs),
    /// Print the manual page
    Man(man::ManArgs),
}

impl CliCommand {
    fn json(&self) -> bool {
        match self {
            CliCommand::Run(run) => run.job.common.json,
            CliCommand::Hold(hold) => hold.common.json,
            CliCommand::Ls(ls) => ls.common.json,
            CliCommand::Show(show) => show.common.json,
            CliCommand::Status(status) => status.common.json,
            CliCommand::Watch(watch) => watch.common.json,
            CliCommand::Metrics(metrics) => metrics.common.json,
            CliCommand::Doctor(doctor) => doctor.common.json,
            CliCommand::Advise(advise) => advise.json,
            CliCommand::Break(break_lock) => break_lock.common.json,
            CliCommand::Cron(cron) => cron.job.common.json,
            CliCommand::Elect(elect) => elect.job.common.json,
            CliCommand::Once(once) => once.job.common.json,
            CliCommand::Claim(claim) => claim.job.common.json,
            #[cfg(feature = "postgres")]
            CliCommand::Jobs(jobs) => jobs.json(),
            CliCommand::Cached(cached) => cached.job.common.json,
            CliCommand::Partitions(partitions) => partitions.job.common.json,
            CliCommand::Limit(limit) => limit.common.json,
            CliCommand::Record(record) => record.json(),
            CliCommand::Store(store) => store.json(),
            #[cfg(feature = "verify")]
            CliCommand::Verify(verify) => verify.common.json,
            CliCommand::Fence(fence) => fence.json(),
            #[cfg(feature = "gate")]
            CliCommand::Gate(gate) => gate.common.json,
            CliCommand::FencedWrite(write) => write.json,
            #[cfg(feature = "lab")]
            CliCommand::Lab(lab) => lab.json(),
            CliCommand::Completions(_) | CliCommand::Man(_) => false,
        }
    }

    /// The subcommand that shows what it is about, with the name.
    fn show(&self) -> Option<String> {
        let show =
            |recipe: &str, name: &LockName| Some(format!("show {}", shell(&format!("{recipe}{name}"))));
        match self {
            CliCommand::Run(run) => show("", run.request.name()),
            CliCommand::Hold(hold) => show("", hold.request.name()),
            CliCommand::Show(shown) => show("", &shown.name),
            CliCommand::Break(break_lock) => show("", &break_lock.name),
            CliCommand::Cron(cron) => show("", cron.named.get()),
            CliCommand::Once(once) => show("once/", once.named.get()),
            CliCommand::Cached(cached) => show("cached/", cached.named.get()),
            CliCommand::Elect(elect) => show("election/", elect.named.get()),
            // These have no single lock. The name comes last, because it may begin with a dash.
            CliCommand::Claim(claim) => Some(format!("claim --status {}", shell(claim.named.get().as_str()))),
            CliCommand::Partitions(partitions) => {
                Some(format!("partitions --status {}", shell(partitions.named.get().as_str())))
            }
            _ => None,
        }
    }

    /// Whether it runs a command, which must not start with a signal blocked.
    fn runs_command(&self) -> bool {
        match self {
            CliCommand::Run(_) | CliCommand::Cron(_) | CliCommand::Once(_) | CliCommand::Cached(_) => true,
            CliCommand::Elect(elect) => !elect.observe,
            CliCommand::Claim(claim) => !claim.job.command.is_empty(),
            #[cfg(feature = "postgres")]
            CliCommand::Jobs(jobs) => jobs.runs_command(),
            CliCommand::Partitions(partitions) => !partitions.job.command.is_empty(),
            CliCommand::Limit(limit) => !limit.command.is_empty(),
            _ => false,
        }
    }

    fn quiet(&self) -> bool {
        match self {
            CliCommand::Run(run) => run.job.quiet,
            CliCommand::Cron(cron) => cron.job.quiet,
            CliCommand::Elect(elect) => elect.job.quiet,
            CliCommand::Once(once) => once.job.quiet,
            CliCommand::Claim(claim) => claim.job.quiet,
            #[cfg(feature = "postgres")]
            CliCommand::Jobs(jobs) => jobs.quiet(),
            CliCommand::Cached(cached) => cached.job.quiet,
            CliCommand::Partitions(partitions) => partitions.job.quiet,
            // The laws make the faults that would be reported.
            #[cfg(feature = "verify")]
            CliCommand::Verify(_) => true,
            _ => false,
        }
    }
}

/// Executes the subcommand, prints its failure, and returns the exit code.
pub fn run(command: CliCommand) -> i32 {
    let (json, show) = (command.json(), command.show());
    log::start(json, command.quiet());
    if !command.runs_command() {
        signals::stop_between_transactions();
    }
    let result = match command {
        CliCommand::Run(run) => block_on(signals::stoppable(run.execute())),
        CliCommand::Hold(hold) => block_on(hold.execute()),
        CliCommand::Ls(ls) => block_on(ls.execute()),
        CliCommand::Show(show) => block_on(show.execute()),
        CliCommand::Status(status) => block_on(status.execute()),
        CliCommand::Watch(watch) => block_on(watch.execute()),
        CliCommand::Metrics(metrics) => block_on(metrics.execute()),
        CliCommand::Doctor(doctor) => block_on(doctor.execute()),
        CliCommand::Advise(advise) => advise.execute(),
        CliCommand::Break(break_lock) => block_on(break_lock.execute()),
        CliCommand::Cron(cron) => block_on(signals::stoppable(cron.execute())),
        CliCommand::Elect(elect) => block_on(signals::stoppable(elect.execute())),
        CliCommand::Once(once) => block_on(signals::stoppable(once.execute())),
        CliCommand::Claim(claim) => block_on(signals::stoppable(claim.execute())),
        #[cfg(feature = "postgres")]
        CliCommand::Jobs(jobs) => block_on(signals::stoppable(jobs.execute())),
        CliCommand::Cached(cached) => block_on(signals::stoppable(cached.execute())),
        CliCommand::Partitions(partitions) => block_on(signals::stoppable(partitions.execute())),
        CliCommand::Limit(limit) => block_on(signals::stoppable(limit.execute())),
        CliCommand::Record(record) => block_on(record.execute()),
        CliCommand::Store(store) => block_on(store.execute()),
        #[cfg(feature = "verify")]
        CliCommand::Verify(verify) => block_on(verify.execute()),
        CliCommand::Fence(fence) => block_on(fence.execute()),
        #[cfg(feature = "gate")]
        CliCommand::Gate(gate) => gate.execute(),
        CliCommand::FencedWrite(write) => write.execute(),
        #[cfg(feature = "lab")]
        CliCommand::Lab(lab) => block_on(lab.execute()),
        CliCommand::Completions(completions) => completions.execute().map(|()| OK),
        CliCommand::Man(man) => man.execute().map(|()| OK),
    };
    result.unwrap_or_else(|failure| {
        let failure = failure.about(show.as_deref());
        failure.print(json);
        failure.code
    })
}

/// Runs it on this thread. One thread is enough here, and the child's parent must be the thread that lives longest.
fn block_on<F: Future<Output = Result<i32, ExitFailure>>>(work: F) -> Result<i32, ExitFailure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| {
        ExitFailure::new(
            lockkeeper::Outcome::Unavailable,
            format!("the operating system gives no event queue: {e}"),
        )
    })?;
    let result = runtime.block_on(work);
    // Waiting for its helper threads would only delay the exit.
    runtime.shutdown_background();
    result
}
