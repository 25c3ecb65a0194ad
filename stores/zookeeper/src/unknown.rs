//! Ends holds that were not renewed, and requests without a reply, until the servers confirm it.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Names, ReleaseOutcome};

use crate::error::Failure;
use crate::events::EventTag;
use crate::hold_registry::OwnHold;
use crate::keys::AttemptHash;
use crate::release::RemovedBy;
use crate::store::StoreInner;

/// The pause before the end of a hold is sent again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Ends the holds that were not renewed in time, for as long as the store is open.
pub async fn run(shared: Arc<StoreInner>) {
    loop {
        let now = shared.clock.now();
        let (due, next) = shared.registry.take_due(now);
        for (hash, hold) in due {
            let shared = shared.clone();
            tokio::spawn(async move { shared.end_until_confirmed(hash, hold).await });
        }
        let pause = next.filter(|next| *next != BootInstant::NEVER).map(|next| next.since(now));
        tokio::select! {
            () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
            () = shared.registry.changed() => {}
        }
    }
}

impl StoreInner {
    /// Removes the nodes of a hold, and retries until the servers confirm it.
    async fn end_until_confirmed(self: &Arc<Self>, hash: AttemptHash, hold: OwnHold) {
        loop {
            if !self.registry.table().ending.contains(&hash) {
                return;
            }
            let done = match &hold.grant {
                Some(known) => self.expire(&hash, &hold, known).await,
                None => self.remove_late_attempt(&hold.names, &hash, RemovedBy::Registry).await.map(|_| ()),
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

    /// Removes an attempt whose request may still be on its way to a server.
    pub async fn remove_late_attempt(
        self: &Arc<Self>,
        names: &Names,
        hash: &AttemptHash,
        by: RemovedBy,
    ) -> Result<ReleaseOutcome, Failure> {
        match self.replace_barrier(&*self.connection.session().await?).await {
            // Servers reject requests of a session that has ended.
            Ok(()) | Err(Failure::SessionEnded) => {
                self.remove_entries(names, hash, EventTag::Released, by).await
            }
            Err(failure) => Err(failure),
        }
    }
}
