//! `lockkeeper jobs run`: a command for each job that is due.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use lockkeeper::LockName;

use super::JobTableArgs;
use crate::child::item::ItemCommand;
use crate::child::job;
use crate::duration;
use crate::exit::ExitFailure;
use crate::report::{EventOutput, Report};
use crate::signals::SignalStream;
use crate::store::HIDDEN;
use crate::work::{ItemWorker, WorkSource, WorkerArgs};

/// Run a command for each job that is due, until a signal comes.
///
/// Start it on as many hosts as you like: each job goes to one worker at a time. If a worker dies, its jobs go to others after
/// the lease, with a higher fence; its late completion is refused. A command that fails is tried again later, a few times.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct JobsRunArgs {
    #[command(flatten)]
    pub table: JobTableArgs,
    /// End when no job is due, instead of waiting
    #[arg(long)]
    pub drain: bool,
    #[command(flatten)]
    pub worker: WorkerArgs,
    /// Time between TERM and KILL if a lease is about to be lost; at most a quarter of the lease
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_up_to_a_day, allow_hyphen_values = true)]
    pub grace: Duration,
    /// Print errors only
    #[arg(long, short)]
    pub quiet: bool,
    /// Do not pass the database on to the command: neither LOCKKEEPER_POSTGRES nor the store of LOCKKEEPER_STORE or LOCKKEEPER_STORE_FILE
    #[arg(long)]
    pub hide_store: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper jobs run --table mails --parallel 4 -- ./send-mail
  lockkeeper jobs run --table mails --drain -- ./send-mail       ends when no job is due: for cron

The command gets LOCKKEEPER_JOB (the primary key), LOCKKEEPER_FENCE (the fencing token),
LOCKKEEPER_ATTEMPT (1 at first) and LOCKKEEPER_TTL_MS. It should send the fence with every write: a
worker that was paused may still try. Exit code 0 of the command means done, every other one that it
failed.

Exit codes: 0, or that of the last command whose job failed for good; 64 bad call, 69 the database is
unreachable at the start, 128+n a signal.";

impl JobsRunArgs {
    pub async fn execute(self) -> Result<i32, ExitFailure> {
        self.worker.check()?;
        job::check(&self.command)?;
        let rules = &self.worker;
        let jobs = self.table.open().await?;
        let jobs = jobs.rules(rules.lease, rules.max_attempts, rules.backoff, rules.backoff_max)?;
        let group = format!("jobs/{}", jobs.table().table);
        let name = LockName::new(&group)?;
        let json = self.table.database.json;
        let report = Report::new(std::iter::once(&name), json, self.quiet, EventOutput::Stderr);
        let env = if self.hide_store { HIDDEN.to_vec() } else { Vec::new() };
        let command = ItemCommand { command: &self.command, grace: self.grace, env, json };
        let worker = ItemWorker { args: rules, command, report: &report, group, skip: self.drain };
        let mut signals = SignalStream::ending()?;
        worker.run(WorkSource::Table(jobs), &mut signals).await
    }
}
