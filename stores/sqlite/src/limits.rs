//! Rate limits: one row for each bucket that is not full. The boot-time clock decides, which never goes back while the machine runs.

use async_trait::async_trait;
use lockkeeper_core::limit::{BucketChange, LimitOutcome, LimitRequest, decide};
use lockkeeper_core::{Limits, Result};
use rusqlite::params;

use crate::codec::{instant_nanos, signed};
use crate::error::sql_error;
use crate::statements;
use crate::store::SqliteStore;
use crate::transaction::Tx;

impl Tx<'_> {
    /// Whether a take has ever created the table.
    pub fn has_limits(&self) -> rusqlite::Result<bool> {
        self.sql.prepare_cached(statements::HAS_LIMIT_TABLE)?.query_row([], |row| row.get(0))
    }

    /// Removes buckets that are full.
    pub fn sweep_limits(&self) -> Result<()> {
        if self.has_limits().map_err(sql_error)? {
            self.change(statements::REMOVE_FULL_BUCKETS, [instant_nanos(self.now.moment)])?;
        }
        Ok(())
    }

    fn limit(&mut self, request: &LimitRequest) -> Result<LimitOutcome> {
        if !self.has_limits().map_err(sql_error)? {
            self.change(statements::LIMIT_TABLE, [])?;
            self.change(statements::LIMIT_INDEX, [])?;
        }
        let now = self.now.moment;
        let keys = || request.buckets.iter().map(|bucket| bucket.spec.key().as_str());
        let full_at = |row: &rusqlite::Row<'_>| row.get::<_, i64>(0).map(i64::unsigned_abs);
        let stored: Result<Vec<Option<u64>>> =
            keys().map(|key| self.one(statements::BUCKET, [key], full_at)).collect();
        let (outcome, changes) = decide(request, now.as_nanos(), &stored?);
        for (key, change) in keys().zip(changes) {
            match change {
                BucketChange::Keep => {}
                BucketChange::Set(at) => {
                    self.change(statements::SET_BUCKET, params![key, signed(at), instant_nanos(now)])?;
                    self.change(statements::REMOVE_FULL_BUCKETS, [instant_nanos(now)])?;
                }
                BucketChange::Remove => _ = self.change(statements::REMOVE_BUCKET, [key])?,
            }
        }
        Ok(outcome)
    }
}

#[async_trait]
impl Limits for SqliteStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        request.check()?;
        let request = request.clone();
        self.change(move |tx| tx.limit(&request)).await
    }
}
