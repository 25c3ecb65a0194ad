//! A job that this worker has: its fence, its lease, and the ways in which an attempt ends.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Fence, Result};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_postgres::tokio_postgres::types::Type;
use lockkeeper_postgres::tokio_postgres::{Row, Transaction};

use super::Jobs;
use super::connection::JobParameter;
use super::error::{to_error, unexpected};
use super::table::get;
use super::worker::deadline;
use crate::claim::AfterFailure;
use crate::recipes::backoff::{JitteredBackoff, growing_pause};
use crate::recipes::extend::{ExtendableLease, run_extended};

/// How often a change looks again that met a change by another worker.
const ROUNDS: usize = 4;
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

/// The outcome of a change by the worker that has the job.
enum RowBefore {
    Changed,
    /// The change was made before, by a request whose reply was lost.
    Repeated,
    /// Another worker changes the row right now.
    Contended,
}

/// A change, and in which state the row is when the change was made before.
#[derive(Clone, Copy)]
enum JobChange {
    Complete,
    Fail,
    GiveBack,
    Extend,
}

impl JobChange {
    /// Whether an earlier request of this change, whose reply was lost, may have been applied although a later one met this error. A job that
    /// failed or was given back can be claimed by another worker at once, and the row of one that has ended can be deleted.
    fn may_precede(self, error: &Error) -> bool {
        match self {
            JobChange::Fail | JobChange::GiveBack => matches!(error, Error::Stale { .. } | Error::Lost(_)),
            JobChange::Complete => matches!(error, Error::Lost(_)),
            JobChange::Extend => false,
        }
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
        self.change(JobChange::Extend, sql, &[(&seconds, Type::FLOAT8)]).await?;
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
        self.change(JobChange::Complete, &self.jobs.statements.complete, &[]).await
    }

    /// The same inside a transaction of the caller in the same database: what the work has written and the end of the job
    /// are committed together, or not at all. If another worker has claimed the job since, the answer is
    /// [`Error::Stale`]: roll back.
    pub async fn complete_in(&self, tx: &Transaction<'_>) -> Result<()> {
        let fence = i64::try_from(self.fence.get()).expect("fences are below 2^53");
        for _ in 0..ROUNDS {
            let parameters: [JobParameter<'_>; 2] = [(&self.values, Type::TEXT_ARRAY), (&fence, Type::INT8)];
            let rows = tx.query_typed(&self.jobs.statements.complete, &parameters).await;
            match self.met(JobChange::Complete, &rows.map_err(|e| to_error(&e, false))?)? {
                RowBefore::Contended => {}
                RowBefore::Changed | RowBefore::Repeated => return Ok(()),
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
        self.change(JobChange::Fail, &self.jobs.statements.fail, &more).await?;
        Ok(match self.attempts >= most {
            true => AfterFailure::FailedForGood,
            false => AfterFailure::RetryAfter(pause),
        })
    }

    /// Gives the job back: another worker can claim it at once, and this attempt does not count.
    pub async fn give_back(self) -> Result<()> {
        self.change(JobChange::GiveBack, &self.jobs.statements.give_back, &[]).await
    }

    /// Sends a change until its outcome is known, or the lease is over.
    async fn change(&self, change: JobChange, sql: &str, more: &[JobParameter<'_>]) -> Result<()> {
        let (fence, mut unknown) = (i64::try_from(self.fence.get()).expect("fences are below 2^53"), None);
        let (mut backoff, mut contentions) = (JitteredBackoff::new(&SystemClock), 0);
        loop {
            let mut parameters: Vec<JobParameter<'_>> =
                vec![(&self.values, Type::TEXT_ARRAY), (&fence, Type::INT8)];
            parameters.extend_from_slice(more);
            let error = match self.jobs.connection.rows(sql, &parameters).await {
                Ok(rows) => match self.met(change, &rows) {
                    Ok(RowBefore::Changed | RowBefore::Repeated) => return Ok(()),
                    Ok(RowBefore::Contended) if contentions < ROUNDS => {
                        contentions += 1;
                        continue;
                    }
                    Ok(RowBefore::Contended) => contended(),
                    Err(error) if change.may_precede(&error) => {
                        return Err(unknown.map_or(error, Error::Unknown));
                    }
                    Err(error) => return Err(error),
                },
                Err(error) => error,
            };
            if let Error::Unknown(why) = &error {
                unknown = Some(why.clone());
            }
            let passes = matches!(error, Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_));
            if !passes || !self.is_held() {
                return Err(unknown.map_or(error, Error::Unknown));
            }
            backoff.wait().await;
        }
    }

    /// The outcome of a change.
    fn met(&self, change: JobChange, rows: &[Row]) -> Result<RowBefore> {
        let row = rows.first().ok_or_else(|| unexpected("no row"))?;
        if get::<i64>(row, 0)? > 0 {
            return Ok(RowBefore::Changed);
        }
        let Some(state) = get::<Option<String>>(row, 1)? else {
            return Err(Error::Lost(format!("the row of the job {:?} is gone", self.key)));
        };
        let (fence, held): (i64, bool) = (get(row, 2)?, get(row, 3)?);
        let seen = u64::try_from(fence).ok().and_then(|fence| Fence::new(fence).ok());
        match (seen, &*state, held, change) {
            (Some(seen), ..) if seen > self.fence => Err(Error::Stale { presented: self.fence, seen }),
            (Some(seen), ..) if seen != self.fence => Err(fell_back(&self.key)),
            (None, ..) => Err(fell_back(&self.key)),
            (_, "done", _, JobChange::Complete) => Ok(RowBefore::Repeated),
            (_, "failed", _, JobChange::Fail) => Ok(RowBefore::Repeated),
            (_, "open", false, JobChange::Fail | JobChange::GiveBack) => Ok(RowBefore::Repeated),
            (_, "open", true, JobChange::Extend) => Err(over()),
            (_, "open", true, _) => Ok(RowBefore::Contended),
            _ => Err(Error::Lost(format!("this attempt of the job {:?} has ended already", self.key))),
        }
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

fn over() -> Error {
    Error::Lost("the lease of the job is over: another worker may have it".into())
}

fn fell_back(key: &str) -> Error {
    Error::Lost(format!(
        "the fence of the job {key:?} has gone back: another program has written to lk_fence"
    ))
}

fn contended() -> Error {
    Error::Unavailable("other workers change the job at the same time".into())
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
