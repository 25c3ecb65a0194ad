//! One change of the row of a taken job: sent until its outcome is known, and why it changed nothing.

use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_host::SystemClock;
use lockkeeper_postgres::tokio_postgres::Row;
use lockkeeper_postgres::tokio_postgres::types::Type;

use super::connection::JobParameter;
use super::table::get;
use super::taken::TakenJob;
use crate::recipes::backoff::JitteredBackoff;

/// How often a change looks again that met a change by another worker.
pub(super) const ROUNDS: usize = 4;

/// The row of a change that changed nothing.
pub(super) enum RowBefore {
    /// The change was made before, by a request whose reply was lost.
    Repeated,
    /// Another worker changes the row right now.
    Contended,
}

/// A change, and in which state the row is when the change was made before.
#[derive(Clone, Copy)]
pub(super) enum JobChange {
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
    /// Sends a change until its outcome is known, or the lease is over. `unknown`: an earlier request of it has no reply, and why.
    pub(super) async fn change(
        &self,
        change: JobChange,
        sql: &str,
        more: &[JobParameter<'_>],
        mut unknown: Option<String>,
    ) -> Result<()> {
        let (mut backoff, mut contentions) = (JitteredBackoff::new(&SystemClock), 0);
        loop {
            let error = match self.send(sql, more).await {
                Ok(true) => return Ok(()),
                Ok(false) => match self.look(change).await {
                    Ok(RowBefore::Repeated) => return Ok(()),
                    Ok(RowBefore::Contended) if contentions < ROUNDS => {
                        contentions += 1;
                        continue;
                    }
                    Ok(RowBefore::Contended) => contended(),
                    Err(error) if change.may_precede(&error) => {
                        return Err(unknown.map_or(error, Error::Unknown));
                    }
                    Err(error @ (Error::Stale { .. } | Error::Lost(_))) => return Err(error),
                    // To look changes nothing.
                    Err(Error::Unknown(why)) => Error::Unavailable(why),
                    Err(error) => error,
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

    /// Sends a change once. Returns whether it changed the row.
    async fn send(&self, sql: &str, more: &[JobParameter<'_>]) -> Result<bool> {
        let fence = self.fence_parameter();
        let mut parameters: Vec<JobParameter<'_>> =
            vec![(&self.values, Type::TEXT_ARRAY), (&fence, Type::INT8)];
        parameters.extend_from_slice(more);
        Ok(!self.jobs.connection.frequent_rows(sql, &parameters).await?.is_empty())
    }

    /// Why a change changed nothing.
    async fn look(&self, change: JobChange) -> Result<RowBefore> {
        let key: [JobParameter<'_>; 1] = [(&self.values, Type::TEXT_ARRAY)];
        self.met(change, &self.jobs.connection.rows(&self.jobs.statements.look, &key).await?)
    }

    pub(super) fn fence_parameter(&self) -> i64 {
        i64::try_from(self.fence.get()).expect("fences are below 2^53")
    }

    pub(super) fn met(&self, change: JobChange, rows: &[Row]) -> Result<RowBefore> {
        let Some(row) = rows.first() else {
            return Err(Error::Lost(format!("the row of the job {:?} is gone", self.key)));
        };
        let state: String = get(row, 0)?;
        let (fence, held): (i64, bool) = (get(row, 1)?, get(row, 2)?);
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

pub(super) fn over() -> Error {
    Error::Lost("the lease of the job is over: another worker may have it".into())
}

fn fell_back(key: &str) -> Error {
    Error::Lost(format!(
        "the fence of the job {key:?} has gone back: another program has written to lk_fence"
    ))
}

pub(super) fn contended() -> Error {
    Error::Unavailable("other workers change the job at the same time".into())
}
