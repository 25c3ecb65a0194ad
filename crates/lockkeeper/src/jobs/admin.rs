//! The operator's calls for a job table: counts, the jobs that failed for good, and another chance for them.

use lockkeeper_core::{Fence, Result, WallTime};
use lockkeeper_postgres::tokio_postgres::types::Type;

use super::Jobs;
use super::error::unexpected;
use super::table::get;

/// How many jobs are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobCounts {
    /// They can be claimed now.
    pub due: u64,
    /// They are not due yet: they come later, or wait for their next try.
    pub waiting: u64,
    /// A worker has them.
    pub taken: u64,
    /// They are done.
    pub done: u64,
    /// They have failed for good.
    pub failed: u64,
}

/// A job that has failed for good.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedJob {
    /// The primary key of its row, as [`super::TakenJob::key`] shows it.
    pub key: String,
    /// How many attempts there were.
    pub attempts: u32,
    /// Why the last one failed.
    pub error: String,
    /// The fence of its last attempt.
    pub fence: Option<Fence>,
    /// When it failed, by the clock of the database.
    pub at: WallTime,
}

impl Jobs {
    /// How many jobs are in which state. It reads the whole table.
    pub async fn counts(&self) -> Result<JobCounts> {
        let rows = self.connection.rows(&self.statements.counts, &[]).await?;
        let row = rows.first().ok_or_else(|| unexpected("no row"))?;
        let count = |at| u64::try_from(get::<i64>(row, at)?).map_err(unexpected);
        Ok(JobCounts {
            due: count(0)?,
            waiting: count(1)?,
            taken: count(2)?,
            done: count(3)?,
            failed: count(4)?,
        })
    }

    /// Up to `most` of the jobs that have failed for good, the oldest first.
    pub async fn failed(&self, most: usize) -> Result<Vec<FailedJob>> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let rows = self.connection.rows(&self.statements.failed, &[(&most, Type::INT8)]).await?;
        let each = rows.iter().map(|row| {
            Ok(FailedJob {
                key: self.table.show_key(&get::<Vec<String>>(row, 0)?),
                fence: u64::try_from(get::<i64>(row, 1)?).ok().and_then(|fence| Fence::new(fence).ok()),
                attempts: u32::try_from(get::<i32>(row, 2)?).map_err(unexpected)?,
                error: get(row, 3)?,
                at: WallTime::from_micros(u64::try_from(get::<i64>(row, 4)?).unwrap_or(0)),
            })
        });
        each.collect()
    }

    /// Lets a job that has failed for good be tried again, with as many attempts as at first. `false`: there is no such
    /// job, or it had not failed for good.
    pub async fn retry(&self, key: &str) -> Result<bool> {
        let values = self.table.parse_key(key)?;
        let sql = format!("{} RETURNING 1", self.statements.retry);
        Ok(!self.connection.rows(&sql, &[(&values, Type::TEXT_ARRAY)]).await?.is_empty())
    }

    /// The same for all jobs that have failed for good. Returns how many.
    pub async fn retry_all(&self) -> Result<u64> {
        let sql = format!("WITH hit AS ({} RETURNING 1) SELECT count(*) FROM hit", self.statements.retry_all);
        let rows = self.connection.rows(&sql, &[]).await?;
        let row = rows.first().ok_or_else(|| unexpected("no row"))?;
        u64::try_from(get::<i64>(row, 0)?).map_err(unexpected)
    }
}
