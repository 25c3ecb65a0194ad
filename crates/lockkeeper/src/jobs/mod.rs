//! Jobs in a PostgreSQL table of the caller's: each row goes to one worker at a time, with a lease and a fence.
//!
//! [`install`] adds six columns to the table. [`Jobs::claim`] is one statement with `FOR UPDATE SKIP LOCKED`, so workers
//! neither wait for each other nor hold a transaction open while they work. A worker that dies loses its jobs when their
//! lease is over; they return with a higher fence (the fencing token), and the late completion of the old worker is refused.
//! [`Jobs::complete_all`] ends a batch in one statement.
//!
//! ```no_run
//! # async fn example() -> lockkeeper::Result<()> {
//! # async fn send(_: &str, _: lockkeeper::Fence) -> Result<(), String> { Ok(()) }
//! use lockkeeper::jobs::Jobs;
//!
//! let jobs = Jobs::open("postgres://app@db/shop", "mails").await?;
//! loop {
//!     for job in jobs.wait_for(10).await? {
//!         match job.run(send(job.key(), job.fence())).await {
//!             Ok(Ok(())) => job.complete().await?,
//!             Ok(Err(why)) => drop(job.fail(why).await?),
//!             Err(_) => {}                                  // the lease is lost: another worker has it
//!         }
//!     }
//! }
//! # }
//! ```

mod admin;
mod batch;
mod change;
mod connection;
mod error;
mod install;
mod prepared;
mod statements;
mod table;
mod taken;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use lockkeeper_postgres::{Options, connect_to};

pub use admin::{FailedJob, JobCounts};
use connection::JobConnection;
pub use install::{ExistingRows, install, install_sql, uninstall, worker_sql};
use statements::JobStatements;
pub use table::JobTable;
pub use taken::TakenJob;

/// The most jobs of one batch.
pub const BATCH_MAX: usize = 1000;

/// The jobs of one table, for one worker or several tasks of it. Clones share one connection, which is opened again when it
/// has ended.
#[derive(Clone, Debug)]
pub struct Jobs {
    connection: Arc<JobConnection>,
    table: Arc<JobTable>,
    statements: Arc<JobStatements>,
    rules: JobRules,
}

/// The rules for the attempts of a job.
#[derive(Clone, Copy, Debug)]
struct JobRules {
    lease: Duration,
    max_attempts: u32,
    backoff: (Duration, Duration),
    poll: Duration,
}

impl Jobs {
    /// The jobs of a table, by the address of its database and its name as in SQL.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such table, or [`install`] has not been called for it.
    pub async fn open(url: &str, table: &str) -> Result<Jobs> {
        let options = Options::from_url(url)?;
        let mut client = connect_to(&options).await?;
        let table = JobTable::find(&mut client, table).await?;
        if !table.installed {
            return Err(Error::invalid(format!(
                "{0} is no job table yet: lockkeeper jobs install --table '{0}'",
                table.table
            )));
        }
        let rules = JobRules {
            lease: Duration::from_secs(30),
            max_attempts: 5,
            backoff: (Duration::from_secs(1), Duration::from_secs(5 * 60)),
            poll: Duration::from_secs(1),
        };
        let (connection, statements) =
            (JobConnection::new(options, client).await?, JobStatements::of(&table));
        Ok(Jobs {
            connection: Arc::new(connection),
            statements: Arc::new(statements),
            table: Arc::new(table),
            rules,
        })
    }

    /// The table.
    pub fn table(&self) -> &JobTable {
        &self.table
    }

    /// How long a worker may be silent before another one can claim its jobs (100 ms to 24 h, 30 s by default), how many
    /// attempts a job has before it has failed for good (5 by default), and how long it waits after its first failed
    /// attempt and at most (a second and five minutes by default; the wait doubles, and up to a half of it is random).
    ///
    /// # Errors
    /// [`Error::Invalid`] for rules that cannot be.
    pub fn rules(
        mut self,
        lease: Duration,
        max_attempts: u32,
        first_pause: Duration,
        longest_pause: Duration,
    ) -> Result<Self> {
        let backoff = (first_pause, longest_pause);
        taken::check_rules(lease, backoff, max_attempts)?;
        self.rules = JobRules { lease, max_attempts, backoff, ..self.rules };
        Ok(self)
    }

    /// How often a worker looks for jobs while none is due. Every second by default.
    #[must_use]
    pub fn poll(mut self, every: Duration) -> Self {
        self.rules.poll = every;
        self
    }
}
