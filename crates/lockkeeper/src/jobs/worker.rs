//! How a worker claims jobs: one statement for a batch.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Fence, Result, lease::margin};
use lockkeeper_host::{Clock, SystemClock, host_name};
use lockkeeper_postgres::tokio_postgres::types::Type;

use super::connection::JobParameter;
use super::error::unexpected;
use super::table::get;
use super::taken::TakenJob;
use super::{BATCH_MAX, Jobs};
use crate::recipes::backoff::pause_between_polls;

impl Jobs {
    /// Claims up to `most` jobs, 1 to 1000, that are due, in one statement: rows that another worker is about to claim are
    /// skipped. Empty: none is due.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the database did not answer: jobs that were claimed without a reply are free again when their
    /// lease is over, and that attempt counts.
    pub async fn claim(&self, most: usize) -> Result<Vec<TakenJob>> {
        if most == 0 || most > BATCH_MAX {
            return Err(Error::invalid(format!("a batch of {most} jobs: 1 to {BATCH_MAX} are possible")));
        }
        let rules = &self.rules;
        let holder: String =
            format!("{}, pid {}", host_name(), std::process::id()).chars().take(300).collect();
        let (count, limit) = (most as i64, i32::try_from(rules.max_attempts).unwrap_or(i32::MAX));
        let seconds = rules.lease.as_secs_f64();
        let parameters: [JobParameter<'_>; 4] =
            [(&count, Type::INT8), (&limit, Type::INT4), (&seconds, Type::FLOAT8), (&holder, Type::TEXT)];
        let claim = self.statements.claim_of(most);
        loop {
            let sent_at = SystemClock.now();
            let rows = self.connection.frequent_rows(&claim, &parameters).await?;
            let (mut taken, mut buried) = (Vec::new(), 0);
            for row in &rows {
                if get::<String>(row, 3)? == "failed" {
                    buried += 1;
                    continue;
                }
                let values: Vec<String> = get(row, 0)?;
                let fence = u64::try_from(get::<i64>(row, 1)?).map_err(unexpected)?;
                taken.push(TakenJob {
                    jobs: self.clone(),
                    key: self.table.show_key(&values),
                    values,
                    fence: Fence::new(fence)?,
                    attempts: u32::try_from(get::<i32>(row, 2)?).map_err(unexpected)?,
                    deadline: AtomicU64::new(deadline(sent_at, rules.lease).as_nanos()),
                });
            }
            // A batch of nothing but jobs that had their last attempt is no sign that none is due.
            if !taken.is_empty() || buried == 0 {
                return Ok(taken);
            }
        }
    }

    /// Claims up to `most` jobs, and waits until there is at least one. It looks as often as [`Jobs::poll`] says.
    pub async fn wait_for(&self, most: usize) -> Result<Vec<TakenJob>> {
        loop {
            let taken = self.claim(most).await?;
            if !taken.is_empty() {
                return Ok(taken);
            }
            pause_between_polls(&SystemClock, self.rules.poll).await;
        }
    }
}

pub(super) fn deadline(sent_at: BootInstant, lease: Duration) -> BootInstant {
    (sent_at + lease).before(margin(lease))
}
