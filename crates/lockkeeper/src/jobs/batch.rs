//! The end of a batch of jobs: one statement for all of them.

use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{Error, Result};
use lockkeeper_postgres::tokio_postgres::types::Type;

use super::Jobs;
use super::connection::JobParameter;
use super::table::get;
use super::taken::TakenJob;

impl Jobs {
    /// Records that the jobs of a batch are done, in one statement, and returns the outcome of each, in the order of the batch. A job
    /// that the statement does not end is completed alone, as [`TakenJob::complete`] does, so that one late job, or one row that
    /// the database refuses, holds up no other.
    pub async fn complete_all(&self, batch: Vec<TakenJob>) -> Vec<Result<()>> {
        let mut outcomes: Vec<Option<Result<()>>> = batch.iter().map(|_| None).collect();
        let mut unknown = None;
        match self.complete_together(&batch).await {
            Ok(positions) => positions.into_iter().for_each(|at| outcomes[at] = Some(Ok(()))),
            Err(Error::Unknown(why)) => unknown = Some(why),
            Err(_) => {}
        }
        let alone = batch.iter().zip(outcomes).map(|(job, outcome)| {
            let unknown = unknown.clone();
            async move {
                match outcome {
                    Some(outcome) => outcome,
                    None => job.complete_after(unknown).await,
                }
            }
        });
        join_all(alone).await
    }

    /// The positions of the jobs that one statement has ended.
    async fn complete_together(&self, batch: &[TakenJob]) -> Result<Vec<usize>> {
        // Jobs of another table have other keys: they are completed alone.
        let ours: Vec<(usize, &TakenJob)> =
            batch.iter().enumerate().filter(|(_, job)| Arc::ptr_eq(&job.jobs.table, &self.table)).collect();
        if ours.is_empty() {
            return Ok(Vec::new());
        }
        let columns = self.table.key.len();
        let keys: Vec<Vec<&str>> =
            (0..columns).map(|at| ours.iter().map(|(_, job)| &*job.values[at]).collect()).collect();
        let fences: Vec<i64> = ours.iter().map(|(_, job)| job.fence_parameter()).collect();
        let mut parameters: Vec<JobParameter<'_>> =
            keys.iter().map(|column| (column as _, Type::TEXT_ARRAY)).collect();
        parameters.push((&fences, Type::INT8_ARRAY));
        let rows = self.connection.frequent_rows(&self.statements.complete_all, &parameters).await?;
        let positions = rows.iter().map(|row| {
            let position = usize::try_from(get::<i64>(row, 0)?).ok().and_then(|n| n.checked_sub(1));
            // A position that is not ours: that job is completed alone.
            Ok(position.and_then(|at| ours.get(at)).map(|(at, _)| *at))
        });
        Ok(positions.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }
}
