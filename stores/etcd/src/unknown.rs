//! Ends holds that expired, and requests without a reply, until etcd confirms it.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_store_kit::{EndOutcome, OwnHold};

use crate::client::EtcdClient;
use crate::codec::{EntryState, EntryValue};
use crate::error::Failure;
use crate::events::ChangeCause;
use crate::hold_registry::{EtcdHolds, GrantRecord, schedule_recheck};
use crate::keys::KeyId;
use crate::lease::whole_seconds;
use crate::lease_pool::LeasePool;
use crate::proto::RequestOp;
use crate::release::{Releaser, SearchScope};
use crate::revoke::find_revoked;
use crate::statements::{delete, modified_at, put, txn};
use crate::txn_batch::ConflictKey;

/// Ends what no caller holds or waits for any more.
pub struct HoldEnder {
    pub client: Arc<EtcdClient>,
    pub registry: Arc<EtcdHolds>,
    pub leases: Arc<LeasePool>,
    pub releaser: Arc<Releaser>,
}

impl HoldEnder {
    /// Ends the holds that were not renewed in time, while the store is open.
    pub async fn run(self: Arc<Self>) {
        let (registry, clock) = (self.registry.clone(), self.client.clock.clone());
        let end = move |attempt, hold: Arc<OwnHold<GrantRecord>>| {
            let ender = self.clone();
            async move { ender.end(attempt, &hold).await }
        };
        registry.end_expired(clock, end).await;
    }

    async fn end(&self, attempt: KeyId, hold: &OwnHold<GrantRecord>) -> Result<EndOutcome, Failure> {
        if let Some(again) =
            self.registry.table().holds.get_mut(&attempt).filter(|again| again.grant.is_some())
        {
            // A caller sent the request again, and it was granted.
            again.outcome_unknown |= hold.outcome_unknown;
            return Ok(EndOutcome::Superseded);
        }
        let is_left_to_caller = match &hold.grant {
            Some(grant) => {
                self.expire(&attempt, hold, grant).await?;
                false
            }
            None => !self.end_unwanted(hold, &attempt).await?,
        };
        if !is_left_to_caller && !hold.outcome_unknown {
            return Ok(EndOutcome::Confirmed);
        }
        schedule_recheck(&self.registry, &self.client, attempt, hold.clone());
        Ok(EndOutcome::Superseded)
    }

    /// Whether a caller waits for the attempt or holds the lock by it.
    fn is_wanted(&self, attempt: &KeyId) -> bool {
        let table = self.registry.table();
        table.holds.get(attempt).is_some_and(|hold| hold.grant.is_some() || hold.caller.is_some())
    }

    /// Ends what an attempt has stored if no caller wants it. False: a caller does. A call registers itself before it
    /// sends anything to etcd, so a key that was found before the registry was checked is not the result of a newer
    /// call. Keys attached to a lease of another process belong to that process.
    async fn end_unwanted(&self, hold: &OwnHold<GrantRecord>, attempt: &KeyId) -> Result<bool, Failure> {
        let names = &hold.names;
        loop {
            let mut found = self.releaser.find_entries(names, attempt, SearchScope::WithSlots).await?;
            if self.is_wanted(attempt) {
                return Ok(false);
            }
            found.retain(|entry| self.leases.keeps_alive(entry.lease));
            if self.releaser.end_entries(names, found, hold.since).await?.is_some() {
                return Ok(true);
            }
        }
    }

    /// Ends a hold whose lease was not renewed.
    async fn expire(
        &self,
        attempt: &KeyId,
        hold: &OwnHold<GrantRecord>,
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
