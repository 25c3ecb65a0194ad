//! `lockkeeper jobs`: the rows of a PostgreSQL table as jobs that many workers share.

mod install;
mod look;
mod work;

use clap::{Args, Subcommand};
use lockkeeper::jobs::{JobTable, Jobs};

use super::fence_table::DatabaseArgs;
use crate::args::utf8;
use crate::exit::ExitFailure;
use install::{JobsInstallArgs, JobsSqlArgs, JobsUninstallArgs};
use look::{JobsFailedArgs, JobsRetryArgs, JobsStatusArgs};
use work::JobsRunArgs;

/// Let many workers share the rows of a PostgreSQL table: each row goes to one of them at a time.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, subcommand_required = true)]
pub struct JobsArgs {
    #[command(subcommand)]
    pub what: JobsAction,
}

const EXAMPLES: &str = "\
Examples:
  lockkeeper jobs install --postgres postgres://owner@db/shop --table mails
  lockkeeper jobs run --postgres postgres://app@db/shop --table mails --parallel 4 -- ./send-mail
  lockkeeper jobs status --postgres postgres://app@db/shop --table mails
  lockkeeper jobs failed --postgres postgres://app@db/shop --table mails
  lockkeeper jobs retry --postgres postgres://app@db/shop --table mails 4711

The environment variable LOCKKEEPER_POSTGRES stands for --postgres. An install adds six columns that begin with lk_ and
two indexes. A row that the application inserts is a job at once; one with lk_run_at in the future is a job then.";

#[derive(Debug, Subcommand)]
pub enum JobsAction {
    /// Make a table a job table: add the columns
    Install(JobsInstallArgs),
    /// Remove the columns, and what they know
    Uninstall(JobsUninstallArgs),
    /// Print the statements of a worker, for programs in other languages
    Sql(JobsSqlArgs),
    /// Run a command for each job that is due
    Run(Box<JobsRunArgs>),
    /// Print how many jobs are in which state
    Status(JobsStatusArgs),
    /// List the jobs that have failed for good
    Failed(JobsFailedArgs),
    /// Let jobs that have failed for good be tried again
    Retry(JobsRetryArgs),
}

/// Which table, and where.
#[derive(Args, Debug)]
pub struct JobTableArgs {
    #[command(flatten)]
    pub database: DatabaseArgs,
    /// The table, as in SQL: mails, shop.mails, '"Mails"'
    #[arg(long, value_parser = utf8("table"))]
    pub table: String,
}

impl JobTableArgs {
    /// The table, as the database knows it, and a connection.
    async fn find(&self) -> Result<(lockkeeper::postgres::tokio_postgres::Client, JobTable), ExitFailure> {
        let mut client = self.database.open().await?;
        let table = JobTable::find(&mut client, &self.table).await?;
        Ok((client, table))
    }

    async fn open(&self) -> Result<Jobs, ExitFailure> {
        Ok(Jobs::open(self.database.postgres.expose()?, &self.table).await?)
    }
}

impl JobsArgs {
    pub fn json(&self) -> bool {
        self.table().database.json
    }

    pub fn quiet(&self) -> bool {
        matches!(&self.what, JobsAction::Run(run) if run.quiet)
    }

    pub fn runs_command(&self) -> bool {
        matches!(self.what, JobsAction::Run(_))
    }

    fn table(&self) -> &JobTableArgs {
        match &self.what {
            JobsAction::Install(install) => &install.table,
            JobsAction::Uninstall(uninstall) => &uninstall.table,
            JobsAction::Sql(sql) => &sql.table,
            JobsAction::Run(run) => &run.table,
            JobsAction::Status(status) => &status.table,
            JobsAction::Failed(failed) => &failed.table,
            JobsAction::Retry(retry) => &retry.table,
        }
    }

    pub async fn execute(self) -> Result<i32, ExitFailure> {
        match self.what {
            JobsAction::Install(install) => install.execute().await,
            JobsAction::Uninstall(uninstall) => uninstall.execute().await,
            JobsAction::Sql(sql) => sql.execute().await,
            JobsAction::Run(run) => run.execute().await,
            JobsAction::Status(status) => status.execute().await,
            JobsAction::Failed(failed) => failed.execute().await,
            JobsAction::Retry(retry) => retry.execute().await,
        }
    }
}
