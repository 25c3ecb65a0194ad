//! Ends holds that expired, and requests without a reply, until etcd confirms it.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::BootInstant;

use crate::client::EtcdClient;
use crate::codec::{EntryState, EntryValue};
use crate::error::Failure;
use crate::events::ChangeCause;
use crate::hold_registry::{GrantRecord, HoldEntry, HoldRegistry};
use crate::keys::KeyId;
use crate::lease::whole_seconds;
use crate::lease_pool::LeasePool;
use crate::proto::RequestOp;
use crate::release::{Releaser, SearchScope};
use crate::revoke::find_revoked;
use crate::statements::{delete, modified_at, put, txn};
use crate::txn_batch::ConflictKey;

/// The delay before an end that failed is sent again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Ends what no caller holds or waits for any more.
pub struct HoldEnder {
    pub client: Arc<EtcdClient>,
    pub registry: Arc<HoldRegistry>,
    pub leases: Arc<LeasePool>,
    pub releaser: Arc<Releaser>,
}

impl HoldEnder {
    /// Ends the holds that were not renewed in time, while the store is open.
    pub async fn run(self: Arc<Self>) {
        loop {
            let now = self.client.clock.now();
            let (due, next) = self.registry.take_due(now);
            for (attempt, hold) in due {
                let ender = self.clone();
                tokio::spawn(async move { ender.end_until_confirmed(attempt, hold).await });
            }
            let pause = next.filter(|next| *next != BootInstant::NEVER).map(|next| next.since(now));
            tokio::select! {
                () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
                () = self.registry.changed() => {}
            }
        }
    }

    /// Ends a hold, and retries until etcd confirms it.
    async fn end_until_confirmed(&self, attempt: KeyId, hold: HoldEntry) {
        loop {
            if let Some(again) =
                self.registry.lock().holds.get_mut(&attempt).filter(|again| again.grant.is_some())
            {
                // A caller sent the request again, and it was granted.
                again.outcome_unknown |= hold.outcome_unknown;
                return;
            }
            let done = match &hold.grant {
                Some(grant) => self.expire(&attempt, &hold, grant).await,
                None => match self.end_unwanted(&hold, &attempt).await {
                    // Left to the caller that sent it again.
                    Ok(false) => return self.registry.schedule_recheck(&self.client, attempt, hold),
                    done => done.map(|_| ()),
                },
            };
            match done {
                Ok(()) if hold.outcome_unknown => {
                    return self.registry.schedule_recheck(&self.client, attempt, hold);
                }
                Ok(()) => break,
                Err(failure) => {
                    tracing::debug!(?failure, "could not end an expired hold; retrying in 500 ms")
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        self.registry.lock().ending.remove(&attempt);
    }

    /// Ends what an attempt has stored if no caller wants it. False: a caller does. A call registers itself before it
    /// sends anything to etcd, so a key that was found before the registry was checked is not the result of a newer
    /// call. Keys attached to a lease of another process belong to that process.
    async fn end_unwanted(&self, hold: &HoldEntry, attempt: &KeyId) -> Result<bool, Failure> {
        let names = &hold.names;
        loop {
            let mut found = self.releaser.find_entries(names, attempt, SearchScope::WithSlots).await?;
            if self.registry.is_wanted(attempt) {
                return Ok(false);
            }
            found.retain(|entry| self.leases.keeps_alive(entry.lease));
            if self.releaser.end_entries(names, found, hold.min_hold_until).await?.is_some() {
                return Ok(true);
            }
        }
    }

    /// Ends a hold whose lease was not renewed.
    async fn expire(
        &self,
        attempt: &KeyId,
        hold: &HoldEntry,
        grant_record: &GrantRecord,
    ) -> Result<(), Failure> {
        let delay = grant_record.value.lock_delay_ms;
        let lease = match delay {
            0 => None,
            _ => {
                Some(self.client.connection.grant_lease(whole_seconds(Duration::from_millis(delay))).await?.0)
            }
        };
        let keys = self.client.keys.entry_keys(&hold.names, &grant_record.location.key_id);
        let mut ops: Vec<RequestOp> = hold
            .names
            .iter()
            .zip(&keys)
            .map(|(name, key)| match lease {
                None => delete(key),
                Some(lease) => {
                    let value = EntryValue {
                        state: EntryState::Delayed,
                        fence: Some(grant_record.fence),
                        ..grant_record.value.clone()
                    };
                    put(key, value.value_under(name, hold.names.as_slice()), lease)
                }
            })
            .collect();
        let cause_key = self.client.keys.change_cause();
        ops.push(put(
            &cause_key,
            ChangeCause::Expired { names: hold.names.as_slice().to_vec() }.to_bytes(),
            0,
        ));
        let mut conflict_keys = ConflictKey::of_names(&hold.names);
        conflict_keys.push(ConflictKey::new(cause_key));
        let mut modified = vec![grant_record.written; keys.len()];
        loop {
            let unchanged =
                keys.iter().zip(&modified).map(|(key, modified)| modified_at(key, *modified)).collect();
            let request = txn(unchanged, ops.clone(), Vec::new());
            let reply = self.client.batch.send(request, conflict_keys.clone()).await?;
            if reply.txn.succeeded {
                if lease.is_none() {
                    grant_record.location.release();
                }
                return Ok(());
            }
            // A revocation wrote its keys again.
            match find_revoked(&self.client, &hold.names, &grant_record.location.key_id, attempt).await? {
                Some((written, _)) => modified = written,
                None => return Ok(()),
            }
        }
    }
}
