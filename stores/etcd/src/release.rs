//! Releasing a hold or leaving the queue, and ending what an attempt has stored.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Fence, Names, ReleaseOutcome, Result};
use lockkeeper_store_kit::OwnHold;
use lockkeeper_store_kit::admission::AdmissionEntry;

use crate::client::EtcdClient;
use crate::codec::EntryState;
use crate::error::Failure;
use crate::fence_base::FenceBase;
use crate::hold_registry::{EtcdHolds, GrantRecord, schedule_recheck};
use crate::keys::KeyId;
use crate::lease::whole_seconds;
use crate::proto::RequestOp;
use crate::queue::QueueEntry;
use crate::statements::{delete, first_keys, get, modified_at, nested, put, txn};
use crate::txn_batch::ConflictKey;

/// Where to look for the keys of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchScope {
    /// Only under the key with its hash.
    OwnKey,
    /// Also in a key slot of any process: a grant in a slot is older than all other entries of the queue.
    WithSlots,
}

/// Ends what an attempt has stored.
pub struct Releaser {
    pub client: Arc<EtcdClient>,
    pub base: Arc<FenceBase>,
    pub registry: Arc<EtcdHolds>,
}

impl Releaser {
    /// Releases a hold, or leaves the queue. If this call fails, the registry goes on with it.
    pub async fn release_attempt(&self, names: &Names, attempt: KeyId) -> Result<ReleaseOutcome, Failure> {
        let mut release = self.registry.begin_release(&*self.client.clock, attempt, names);
        let since = release.hold.as_ref().and_then(|hold| hold.since);
        let done = match release.hold.as_ref().and_then(|hold| hold.grant.as_ref()) {
            Some(grant_record) => self.release_grant(names, &attempt, grant_record, since).await,
            None => Box::pin(self.end_attempt_of(names, &attempt, SearchScope::WithSlots, since)).await,
        };
        if done.is_ok() {
            let outcome_unknown = |hold: &OwnHold<GrantRecord>| {
                hold.outcome_unknown || hold.grant.is_none() && hold.caller.is_none()
            };
            let hold = release.hold.take().filter(outcome_unknown);
            hold.into_iter().for_each(|hold| schedule_recheck(&self.registry, &self.client, attempt, hold));
        }
        release.finish(done)
    }

    async fn release_grant(
        &self,
        names: &Names,
        attempt: &KeyId,
        grant_record: &GrantRecord,
        since: Option<BootInstant>,
    ) -> Result<ReleaseOutcome, Failure> {
        let min_hold = Duration::from_millis(grant_record.value.min_hold_ms);
        if !min_hold.is_zero() && since.is_none_or(|since| since + min_hold > self.client.clock.now()) {
            return Box::pin(self.end_attempt_of(names, attempt, SearchScope::WithSlots, since)).await;
        }
        let keys = self.client.keys.entry_keys(names, &grant_record.location.key_id);
        let deletions: Vec<RequestOp> = keys.iter().map(|key| delete(key)).collect();
        // Only its holder writes a key, except to start a lock-delay or minimum hold. Without either, the key holds
        // this grant or does not exist, so nothing is compared. But a slot of another process may already belong to
        // another attempt of that process.
        let ours = grant_record.location.slot.is_some() || grant_record.location.key_id == *attempt;
        let plain = ours && grant_record.value.lock_delay_ms == 0 && grant_record.value.min_hold_ms == 0;
        let unchanged =
            keys.iter().filter(|_| !plain).map(|key| modified_at(key, grant_record.written)).collect();
        let conflicts = ConflictKey::of_names(names);
        let reply = self.client.batch.send_optimistic(unchanged, deletions, None, conflicts).await?;
        let deleted = if reply.txn.succeeded { reply.txn.deleted() } else { 0 };
        if deleted == keys.len() {
            grant_record.location.release();
            return Ok(ReleaseOutcome::Released);
        }
        // The hold was broken, or a part of it was deleted.
        match Box::pin(self.end_attempt_of(names, attempt, SearchScope::WithSlots, since)).await? {
            ReleaseOutcome::AlreadyGone if deleted > 0 => Ok(ReleaseOutcome::Released),
            release => Ok(release),
        }
    }

    /// Finds the keys of an attempt.
    pub async fn find_entries(
        &self,
        names: &Names,
        attempt: &KeyId,
        scope: SearchScope,
    ) -> Result<Vec<QueueEntry>, Failure> {
        let keys = &self.client.keys;
        let each = names.iter().map(|name| {
            let mut reads = vec![get(&keys.entry_key(name, attempt))];
            if scope == SearchScope::WithSlots {
                reads.push(first_keys(&keys.lock_prefix(name), 1));
            }
            nested(txn(Vec::new(), reads, Vec::new()))
        });
        let mut ranges = self.client.read(each.collect(), ConflictKey::of_names(names)).await?.into_iter();
        let mut found: Vec<QueueEntry> = Vec::new();
        for name in names {
            let reads = if scope == SearchScope::WithSlots { 2 } else { 1 };
            let kvs = ranges.by_ref().take(reads).flat_map(|range| range.kvs);
            let entries = kvs.filter_map(|kv| QueueEntry::read(keys, name, kv));
            found.extend(entries.filter(|entry| entry.attempt.as_ref() == Some(attempt)));
        }
        found.sort_by(|a, b| a.key.cmp(&b.key));
        found.dedup_by(|a, b| a.key == b.key);
        Ok(found)
    }

    /// Finds the keys of an attempt and ends them.
    pub async fn end_attempt(
        &self,
        names: &Names,
        attempt: &KeyId,
        scope: SearchScope,
    ) -> Result<ReleaseOutcome, Failure> {
        self.end_attempt_of(names, attempt, scope, None).await
    }

    /// The same for a grant whose request this process sent at `since`.
    async fn end_attempt_of(
        &self,
        names: &Names,
        attempt: &KeyId,
        scope: SearchScope,
        since: Option<BootInstant>,
    ) -> Result<ReleaseOutcome, Failure> {
        loop {
            let found = self.find_entries(names, attempt, scope).await?;
            if let Some(release) = self.end_entries(names, found, since).await? {
                return Ok(release);
            }
        }
    }

    /// Ends the entries that were found. `None`: one of them changed meanwhile.
    pub async fn end_entries(
        &self,
        names: &Names,
        mut found: Vec<QueueEntry>,
        since: Option<BootInstant>,
    ) -> Result<Option<ReleaseOutcome>, Failure> {
        found.retain(|entry| entry.is(EntryState::Granted) || entry.is(EntryState::Waiting));
        // A waiting entry beside a granted one belongs to a call that did not hear of the grant.
        let granted_entries = found.iter().find(|entry| entry.is(EntryState::Granted));
        let Some(first) = granted_entries.or(found.first()) else {
            return Ok(Some(ReleaseOutcome::AlreadyGone));
        };
        let unchanged = found.iter().map(|entry| modified_at(&entry.key, entry.modified)).collect();
        let lease = match self.remaining_min_hold(first, since) {
            Some(time) => Some(self.client.connection.grant_lease(whole_seconds(time)).await?.0),
            None => None,
        };
        let fence = first.fence(self.base.get());
        let lingers = |entry: &QueueEntry| lease.filter(|_| entry.is(EntryState::Granted));
        let ops =
            found.iter().map(|entry| end_op(entry, lingers(entry), EntryState::Lingering, fence)).collect();
        let reply =
            self.client.batch.send(txn(unchanged, ops, Vec::new()), ConflictKey::of_names(names)).await?;
        Ok(reply.txn.succeeded.then_some(ReleaseOutcome::Released))
    }

    /// How much longer a minimum hold lasts. The process that acquired it knows `since` when. Another process has only the wall clock.
    fn remaining_min_hold(&self, entry: &QueueEntry, since: Option<BootInstant>) -> Option<Duration> {
        // A revoked lock is to be free.
        let value = entry
            .value
            .as_ref()
            .filter(|value| value.state == EntryState::Granted && value.revoked.is_none())?;
        if let Some(since) = since {
            let left = (since + Duration::from_millis(value.min_hold_ms)).since(self.client.clock.now());
            return (!left.is_zero()).then_some(left);
        }
        let until = value.since_us.as_micros().saturating_add(value.min_hold_ms * 1000);
        let left = until.checked_sub(self.client.clock.wall().as_micros())?;
        // A wall clock that was set back must not extend the minimum hold.
        (left > 0).then(|| Duration::from_micros(left.min(value.min_hold_ms * 1000)))
    }
}

/// Ends one key: deletes it, or writes another state for as long as the lease lasts.
pub fn end_op(entry: &QueueEntry, lease: Option<i64>, state: EntryState, fence: Fence) -> RequestOp {
    match (lease, &entry.value) {
        (Some(lease), Some(value)) => put(&entry.key, value.in_state(state, fence), lease),
        _ => delete(&entry.key),
    }
}
