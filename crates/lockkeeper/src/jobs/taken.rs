//! A job that this worker has: its fence, its lease, and the ways in which an attempt ends.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Fence, Result};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_postgres::tokio_postgres::Transaction;
use lockkeeper_postgres::tokio_postgres::types::Type;

use super::Jobs;
use super::change::{JobChange, ROUNDS, RowBefore, contended, over};
use super::connection::JobParameter;
use super::error::to_error;
use super::worker::deadline;
use crate::claim::AfterFailure;
use crate::recipes::backoff::growing_pause;
use crate::recipes::extend::{ExtendableLease, run_extended};

/// As much of a reason as a row keeps.
const REASON_CHARS: usize = 1000;

/// A job that this worker has claimed.
///
/// Dropping it changes nothing in the database: the job goes to another worker when the lease is over, and the attempt
/// counts. [`TakenJob::give_back`] returns it at once.
#[must_use = "a job that is dropped goes to another worker only when its lease is over"]
pub struct TakenJob {
    pub(super) jobs: Jobs,
    pub(super) values: Vec<String>,
    pub(super) key: String,
    pub(super) fence: Fence,
    pub(super) attempts: u32,
    /// In nanoseconds of the boot-time clock.
    pub(super) deadline: AtomicU64,
}

impl fmt::Debug for TakenJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TakenJob({:?}, fence {}, attempt {})", self.key, self.fence, self.attempts)
    }
}

impl TakenJob {
    /// The primary key of its row: the value as text, or a JSON array of texts if the key has several columns.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The values of the primary key as text.
    pub fn key_values(&self) -> &[String] {
        &self.values
    }

    /// The fence (the fencing token): higher than that of every earlier attempt of this job. Send it with every write.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// How many attempts there have been, with this one.
    pub fn attempt_number(&self) -> u32 {
        self.attempts
    }

    /// Until when no other worker can have the job, unless the lease is extended.
    pub fn deadline(&self) -> BootInstant {
        BootInstant::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Whether no other worker can have the job now.
    pub fn is_held(&self) -> bool {
        SystemClock.now() < self.deadline()
    }

    /// Lets the lease count anew from now. [`Error::Lost`] or [`Error::Stale`] if it was over.
    pub async fn extend(&self) -> Result<()> {
        if !self.is_held() {
            return Err(over());
        }
        let (sent_at, seconds) = (SystemClock.now(), self.jobs.rules.lease.as_secs_f64());
        let sql = &self.jobs.statements.extend;
        self.change(JobChange::Extend, sql, &[(&seconds, Type::FLOAT8)], None).await?;
        self.deadline.store(deadline(sent_at, self.jobs.rules.lease).as_nanos(), Ordering::Release);
        Ok(())
    }

    /// Does `work` and extends the lease meanwhile. If the lease is lost, `work` is dropped before another worker can have
    /// the job, and the answer is [`Error::Lost`].
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        run_extended(self, &SystemClock, self.jobs.rules.lease, work).await
    }

    /// Records that the job is done. [`Error::Stale`] if another worker has claimed it since; then nothing has changed.
    ///
    /// While the database is unreachable the statement is sent again until the lease is over.
    pub async fn complete(self) -> Result<()> {
        self.complete_after(None).await
    }

    /// The same after an earlier request whose outcome is unknown, and why.
    pub(super) async fn complete_after(&self, unknown: Option<String>) -> Result<()> {
        self.change(JobChange::Complete, &self.jobs.statements.complete, &[], unknown).await
    }

    /// The same inside a transaction of the caller in the same database: what the work has written and the end of the job
    /// are committed together, or not at all. If another worker has claimed the job since, the answer is
    /// [`Error::Stale`]: roll back.
    pub async fn complete_in(&self, tx: &Transaction<'_>) -> Result<()> {
        let fence = self.fence_parameter();
        for _ in 0..ROUNDS {
            let parameters: [JobParameter<'_>; 2] = [(&self.values, Type::TEXT_ARRAY), (&fence, Type::INT8)];
            let query = async |sql: &str, parameters: &[JobParameter<'_>]| {
                tx.query_typed(sql, parameters).await.map_err(|e| to_error(&e, false))
            };
            if !query(&self.jobs.statements.complete, &parameters).await?.is_empty() {
                return Ok(());
            }
            match self
                .met(JobChange::Complete, &query(&self.jobs.statements.look, &parameters[..1]).await?)?
            {
                RowBefore::Contended => {}
                RowBefore::Repeated => return Ok(()),
            }
        }
        Err(contended())
    }

    /// Records that the attempt failed, and why. The job is tried again after the back-off, or has failed for good if
    /// there were as many attempts as allowed.
    pub async fn fail(self, reason: impl AsRef<str>) -> Result<AfterFailure> {
        let rules = &self.jobs.rules;
        // PostgreSQL has no text with a zero byte in it.
        let reason: String = reason.as_ref().chars().filter(|c| *c != '\0').take(REASON_CHARS).collect();
        let (most, pause) = (rules.max_attempts, growing_pause(rules.backoff, self.attempts));
        let (limit, seconds) = (i32::try_from(most).unwrap_or(i32::MAX), pause.as_secs_f64());
        let more: [JobParameter<'_>; 3] =
            [(&limit, Type::INT4), (&reason, Type::TEXT), (&seconds, Type::FLOAT8)];
        self.change(JobChange::Fail, &self.jobs.statements.fail, &more, None).await?;
        Ok(match self.attempts >= most {
            true => AfterFailure::FailedForGood,
            false => AfterFailure::RetryAfter(pause),
        })
    }

    /// Gives the job back: another worker can claim it at once, and this attempt does not count.
    pub async fn give_back(self) -> Result<()> {
        self.change(JobChange::GiveBack, &self.jobs.statements.give_back, &[], None).await
    }
}

impl ExtendableLease for TakenJob {
    async fn deadline(&self) -> BootInstant {
        TakenJob::deadline(self)
    }

    async fn extend(&self) -> Result<()> {
        TakenJob::extend(self).await
    }
}

/// Checks a time that PostgreSQL counts as an interval.
pub(super) fn check_rules(lease: Duration, backoff: (Duration, Duration), max_attempts: u32) -> Result<()> {
    use lockkeeper_core::limits::{TTL_MAX, TTL_MIN};
    if lease < TTL_MIN || lease > TTL_MAX {
        return Err(Error::invalid(format!("the lease is {lease:?}: 100ms to 24h are possible")));
    }
    if max_attempts == 0 || i32::try_from(max_attempts).is_err() {
        return Err(Error::invalid("a job needs at least one attempt, and 2147483647 at most"));
    }
    let (first, most) = backoff;
    if first > most || most > TTL_MAX {
        return Err(Error::invalid(format!(
            "the back-off begins with {first:?} and ends with {most:?}: it grows, up to 24h at most"
        )));
    }
    Ok(())
}
