//! Renewing grants: the process checks their keys and keeps their etcd leases alive, for many grants at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{BootInstant, Grant, RenewOutcome, Result};
use lockkeeper_store_kit::{OwnHold, hash_attempt};

use crate::client::EtcdClient;
use crate::codec::EntryState;
use crate::error::Failure;
use crate::hold_registry::{EtcdHolds, GrantRecord, schedule_recheck};
use crate::keys::KeyId;
use crate::lease::EtcdLease;
use crate::lease_pool::LeasePool;
use crate::queue::QueueEntry;
use crate::release::{Releaser, SearchScope};
use crate::revoke::find_revoked;
use crate::statements::{get_key_only, modified_at, put, txn};
use crate::txn_batch::ConflictKey;

/// The state of a grant that a renewal finds.
#[derive(Clone, Debug, PartialEq, Eq)]
enum GrantPresence {
    /// All of its keys, unchanged.
    Intact,
    /// All of its keys, revoked for this reason.
    Revoked(String),
    Gone,
}

/// Renews grants.
pub struct Renewer {
    pub client: Arc<EtcdClient>,
    pub registry: Arc<EtcdHolds>,
    pub leases: Arc<LeasePool>,
    pub releaser: Arc<Releaser>,
}

impl Renewer {
    pub async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let now = self.client.clock.now();
        let attempts: Vec<KeyId> = grants.iter().map(|grant| hash_attempt(&grant.key.attempt)).collect();
        let presence = grants.iter().zip(&attempts).map(|(grant, attempt)| self.check_grant(grant, attempt));
        // Check the keys while the keep-alives are in flight.
        let presence = join_all(presence);
        let leases = join_all(self.leases_of(&attempts, now).into_iter().map(|(lease, until)| async move {
            (lease.id, self.leases.ensure_valid_until(&lease, until).await)
        }));
        let (presence, leases) = tokio::join!(presence, leases);
        let leases: BTreeMap<i64, Result<bool, Failure>> = leases.into_iter().collect();
        let mut failed = None;
        let mut outcomes = Vec::with_capacity(grants.len());
        for (attempt, (grant, presence)) in attempts.iter().zip(grants.iter().zip(presence)) {
            let reply =
                presence.and_then(|presence| Ok(self.renew_hold(now, attempt, grant, presence, &leases)?));
            outcomes.push(reply.unwrap_or_else(|error| {
                tracing::debug!(%error, "a renewal has no reply; its outcome is unknown");
                _ = failed.get_or_insert(error);
                RenewOutcome::Unknown
            }));
        }
        match failed {
            Some(error) if outcomes.iter().all(|reply| *reply == RenewOutcome::Unknown) => Err(error),
            _ => Ok(outcomes),
        }
    }

    /// Extends a hold, or reports it lost. An error if its keys exist and it is unknown whether their lease lasts.
    fn renew_hold(
        &self,
        now: BootInstant,
        attempt: &KeyId,
        grant: &Grant,
        presence: GrantPresence,
        leases: &BTreeMap<i64, Result<bool, Failure>>,
    ) -> Result<RenewOutcome, Failure> {
        if let GrantPresence::Revoked(reason) = presence {
            // A revoked lease is not extended.
            return Ok(RenewOutcome::Revoked(reason.into()));
        }
        let mut table = self.registry.table();
        if let Some(hold) = table.holds.get_mut(attempt).filter(|_| presence == GrantPresence::Intact)
            && let Some(grant_record) = &hold.grant
            && leases.get(&grant_record.lease.id).is_none_or(|alive| !matches!(alive, Ok(false)))
        {
            if let Some(Err(failure)) = leases.get(&grant_record.lease.id) {
                return Err(failure.clone());
            }
            hold.expires = hold.expires.max(now + grant.ttl);
            return Ok(RenewOutcome::Renewed);
        }
        // A later success would not bring the hold back.
        let hold = table.holds.remove(attempt).filter(|hold| hold.outcome_unknown);
        drop(table);
        hold.into_iter().for_each(|hold| schedule_recheck(&self.registry, &self.client, *attempt, hold));
        Ok(RenewOutcome::Lost)
    }

    /// The leases of these holds, and until when each must last.
    fn leases_of(&self, attempts: &[KeyId], now: BootInstant) -> Vec<(Arc<EtcdLease>, BootInstant)> {
        let table = self.registry.table();
        let mut leases: BTreeMap<i64, (Arc<EtcdLease>, BootInstant)> = BTreeMap::new();
        for hold in attempts.iter().filter_map(|attempt| table.holds.get(attempt)) {
            let Some(grant_record) = &hold.grant else { continue };
            let until = now + hold.ttl + Duration::from_millis(grant_record.value.lock_delay_ms);
            grant_record.lease.touch(now);
            let entry =
                leases.entry(grant_record.lease.id).or_insert_with(|| (grant_record.lease.clone(), until));
            entry.1 = entry.1.max(until);
        }
        leases.into_values().collect()
    }

    /// Whether the keys of a grant are unchanged since it was granted.
    async fn check_grant(&self, grant: &Grant, attempt: &KeyId) -> Result<GrantPresence> {
        let grant_record = {
            let table = self.registry.table();
            if table.ending.contains(attempt) {
                return Ok(GrantPresence::Gone);
            }
            let grant_record = table.holds.get(attempt).and_then(|hold| hold.grant.as_ref());
            grant_record.map(|grant_record| (grant_record.location.key_id, grant_record.written))
        };
        match grant_record {
            Some((location, modified)) => {
                let keys = self.client.keys.entry_keys(&grant.key.names, &location);
                let unchanged = keys.iter().map(|key| modified_at(key, modified)).collect();
                // Read one key: a member answers a transaction without reads from its own state, however far behind
                // the leader it is.
                let read = keys.iter().take(1).map(|key| get_key_only(key)).collect();
                let reply = self.client.batch.send_optimistic(unchanged, read, None, Vec::new()).await?;
                if reply.txn.succeeded {
                    return Ok(GrantPresence::Intact);
                }
                let revoked = find_revoked(&self.client, &grant.key.names, &location, attempt).await?;
                Ok(revoked.map_or(GrantPresence::Gone, |(_, reason)| GrantPresence::Revoked(reason)))
            }
            None => self.take_over_grant(grant, attempt).await,
        }
    }

    /// Takes over a grant that another open store acquired, and attaches it to a lease of this process.
    async fn take_over_grant(&self, grant: &Grant, attempt: &KeyId) -> Result<GrantPresence> {
        let found = self.releaser.find_entries(&grant.key.names, attempt, SearchScope::WithSlots).await?;
        let granted_entries: Vec<&QueueEntry> =
            found.iter().filter(|entry| entry.is(EntryState::Granted)).collect();
        let Some((location, value)) =
            granted_entries.first().and_then(|entry| Some((entry.key_id?, entry.value.clone()?)))
        else {
            return Ok(GrantPresence::Gone);
        };
        let together = granted_entries.iter().all(|entry| entry.key_id == Some(location));
        if !together || granted_entries.len() != grant.key.names.count() {
            return Ok(GrantPresence::Gone);
        }
        if let Some(reason) = value.revoked {
            return Ok(GrantPresence::Revoked(reason));
        }
        let needed = grant.ttl + Duration::from_millis(value.lock_delay_ms);
        let (lease, now) = (self.leases.lease(needed).await?, self.client.clock.now());
        let unchanged = granted_entries.iter().map(|entry| modified_at(&entry.key, entry.modified)).collect();
        let puts = granted_entries.iter().filter_map(|entry| {
            let value = entry.value.as_ref()?.in_state(EntryState::Granted, grant.fence);
            Some(put(&entry.key, value, lease.id))
        });
        let request = txn(unchanged, puts.collect(), Vec::new());
        // From here on the grant may be attached to our lease, whether a reply comes or not.
        let mut guard = self.registry.begin(&*self.client.clock, *attempt, &grant.key.names, grant.ttl);
        let reply = self.client.batch.send(request, ConflictKey::of_names(&grant.key.names)).await?;
        guard.left_nothing = !reply.txn.succeeded;
        if guard.left_nothing || !self.leases.ensure_valid_until(&lease, now + needed).await? {
            return Ok(GrantPresence::Gone);
        }
        let (location, written, fence) = (location.into(), reply.revision, grant.fence);
        let grant_record = GrantRecord { location, written, fence, lease, value };
        // Another process acquired the grant, so the start of its minimum hold is not known here.
        let hold = OwnHold::granted(&grant.key.names, grant.ttl, now, grant_record);
        self.registry.insert(*attempt, OwnHold { since: None, ..hold });
        Ok(GrantPresence::Intact)
    }
}
