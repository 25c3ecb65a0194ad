//! Rate limits: one statement with the database's clock. A bucket that is not full is one row.

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitBucket, LimitOperation, LimitOutcome, LimitRequest};
use lockkeeper_core::{Limits, Result};

use crate::codec::unexpected_reply;
use crate::session::first;
use crate::statements::LIMIT;
use crate::store::PostgresStore;

#[async_trait]
impl Limits for PostgresStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        request.check()?;
        let (operation, wait) = match request.operation {
            LimitOperation::Take { wait } => (0, signed(wait.as_nanos() as u64)),
            LimitOperation::Peek => (1, 0),
            LimitOperation::Reset => (2, 0),
            LimitOperation::Refund => (3, 0),
        };
        let keys: Vec<&str> = request.buckets.iter().map(|bucket| bucket.spec.key().as_str()).collect();
        let each = |number: fn(&LimitBucket) -> u64| -> Vec<i64> {
            request.buckets.iter().map(|bucket| signed(number(bucket))).collect()
        };
        let costs = each(|bucket| bucket.spec.cost_nanos(bucket.tokens));
        let (fills, taken) = (each(|bucket| bucket.spec.fill_nanos()), each(|bucket| bucket.taken));
        let params: [crate::session::Param<'_>; 6] = [&operation, &wait, &keys, &costs, &fills, &taken];
        let rows = self.parts.connection.rows(&LIMIT, &params).await?;
        let full_at: Vec<i64> = first(&rows, 2)?;
        if full_at.len() != keys.len() {
            return Err(unexpected_reply());
        }
        let full_at: Vec<u64> = full_at.into_iter().map(i64::unsigned_abs).collect();
        Ok(LimitOutcome::observed(
            request,
            first(&rows, 0)?,
            first::<i64>(&rows, 1)?.unsigned_abs(),
            &full_at,
        ))
    }
}

fn signed(nanos: u64) -> i64 {
    i64::try_from(nanos).unwrap_or(i64::MAX)
}
