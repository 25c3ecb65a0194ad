//! Rate limits: compare-and-swap over records, because a conditional write cannot read the clock of DynamoDB. The wall clock of the client, corrected by the `Date` of the replies
//! decides, and never goes back in a stored bucket.

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{Limits, Result};
use lockkeeper_store_kit::RecordClient;

use crate::store::DynamoStore;

#[async_trait]
impl Limits for DynamoStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        let wall = || self.inner.records.wall();
        let client = RecordClient { records: self, clock: &*self.inner.options.clock, wall: &wall };
        self.inner.limits.limit(client, request).await
    }
}
