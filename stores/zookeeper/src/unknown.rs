//! Ends holds that were not renewed, and requests without a reply, until the servers confirm it.

use std::sync::Arc;

use lockkeeper_store_kit::{AttemptHash, EndOutcome};

use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::hold_registry::{SessionHold, ZooKeeperHolds};
use crate::release::{Releaser, RemovedBy};

/// Ends what no caller holds or waits for any more.
pub struct HoldEnder {
    pub client: Arc<ZooKeeperClient>,
    pub registry: Arc<ZooKeeperHolds>,
    pub releaser: Arc<Releaser>,
}

impl HoldEnder {
    /// Ends the holds that were not renewed in time, for as long as the store is open.
    pub async fn run(self: Arc<Self>) {
        let (registry, clock) = (self.registry.clone(), self.client.clock.clone());
        let end = move |hash, hold: Arc<SessionHold>| {
            let ender = self.clone();
            async move { ender.end(&hash, &hold).await }
        };
        registry.end_expired(clock, end).await;
    }

    /// Removes the nodes of a hold.
    async fn end(&self, hash: &AttemptHash, hold: &SessionHold) -> Result<EndOutcome, Failure> {
        if !self.registry.table().ending.contains(hash) {
            return Ok(EndOutcome::Superseded);
        }
        match &hold.grant {
            Some(known) => self.releaser.expire(hash, hold, known).await?,
            None => _ = self.releaser.remove_late_attempt(&hold.names, hash, RemovedBy::Registry).await?,
        }
        Ok(EndOutcome::Confirmed)
    }
}
