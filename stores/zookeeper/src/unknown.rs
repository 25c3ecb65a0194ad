//! Ends holds that were not renewed, and requests without a reply, until the servers confirm it.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::BootInstant;

use crate::client::ZooKeeperClient;
use crate::hold_registry::{HoldRegistry, OwnHold};
use crate::keys::AttemptHash;
use crate::release::{Releaser, RemovedBy};

/// The pause before the end of a hold is sent again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Ends what no caller holds or waits for any more.
pub struct HoldEnder {
    pub client: Arc<ZooKeeperClient>,
    pub registry: Arc<HoldRegistry>,
    pub releaser: Arc<Releaser>,
}

impl HoldEnder {
    /// Ends the holds that were not renewed in time, for as long as the store is open.
    pub async fn run(self: Arc<Self>) {
        loop {
            let now = self.client.clock.now();
            let (due, next) = self.registry.take_due(now);
            for (hash, hold) in due {
                let ender = self.clone();
                tokio::spawn(async move { ender.end_until_confirmed(hash, hold).await });
            }
            let pause = next.filter(|next| *next != BootInstant::NEVER).map(|next| next.since(now));
            tokio::select! {
                () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
                () = self.registry.changed() => {}
            }
        }
    }

    /// Removes the nodes of a hold, and retries until the servers confirm it.
    async fn end_until_confirmed(&self, hash: AttemptHash, hold: OwnHold) {
        loop {
            if !self.registry.table().ending.contains(&hash) {
                return;
            }
            let done = match &hold.grant {
                Some(known) => self.releaser.expire(&hash, &hold, known).await,
                None => self
                    .releaser
                    .remove_late_attempt(&hold.names, &hash, RemovedBy::Registry)
                    .await
                    .map(|_| ()),
            };
            match done {
                Ok(()) => break,
                Err(failure) => {
                    tracing::debug!(
                        ?failure,
                        "failed to end a hold that was not renewed; the lock stays held, retrying"
                    )
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        self.registry.table().ending.remove(&hash);
    }
}
