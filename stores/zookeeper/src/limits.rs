//! Rate limits: compare-and-swap over records, because ZooKeeper has no clock that a transaction can read. The wall clock of the client
//! decides, and never goes back in a stored bucket.

use async_trait::async_trait;
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{Limits, Result};
use lockkeeper_store_kit::RecordClient;

use crate::store::ZooKeeperStore;

#[async_trait]
impl Limits for ZooKeeperStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        let wall = || self.shared.client.clock.wall();
        let client = RecordClient { records: self, clock: &*self.shared.client.clock, wall: &wall };
        self.shared.limits.limit(client, request).await
    }
}
