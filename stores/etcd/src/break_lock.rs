//! Breaking a lock, and the parts that revoking shares: both change every grant of the lock, each with all of its
//! keys.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Fence, LockName, Result};
use lockkeeper_store_kit::admission::AdmissionEntry;

use crate::client::EtcdClient;
use crate::codec::EntryState;
use crate::events::ChangeCause;
use crate::fence_base::{FenceBase, fence_at};
use crate::keys::KeyId;
use crate::lease::whole_seconds;
use crate::proto::RequestOp;
use crate::queue::{QueueEntry, QueueSnapshot};
use crate::release::end_op;
use crate::statements::{base_unchanged, get, modified_at, put, range_oldest_first, txn, unmodified_since};
use crate::txn_batch::ConflictKey;

/// How many keys one transaction changes at most. A grant has fewer.
const MAX_KEYS: usize = 80;

/// A grant with all of its keys, or the key of a lock-delay.
pub struct GrantKeys {
    pub keys: Vec<QueueEntry>,
    pub names: Vec<LockName>,
}

/// All holds and lock-delays of a lock at one revision.
pub struct LockHolds {
    pub base: u64,
    pub grants: Vec<GrantKeys>,
    prefix: Vec<u8>,
    revision: i64,
}

impl LockHolds {
    /// How many of the grants fit in one transaction. A grant of several names is changed as a whole.
    pub fn fitting_count(&self) -> usize {
        let mut keys = 0;
        let fits = |grant: &&GrantKeys| {
            keys += grant.keys.len();
            keys <= MAX_KEYS
        };
        self.grants.iter().take_while(fits).count()
    }
}

/// Changes all grants of a lock.
pub struct LockBreaker {
    pub client: Arc<EtcdClient>,
    pub base: Arc<FenceBase>,
}

impl LockBreaker {
    /// Ends all holds of the lock. The revision of the write that does it gives the fence.
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let mut touched = BTreeSet::from([name.clone()]);
        loop {
            let holds = self.read_holds(name).await?;
            let selected = &holds.grants[..holds.fitting_count()];
            let mut ops = Vec::new();
            for grant in selected {
                ops.extend(self.end_ops(grant, holds.base).await?);
            }
            let (names, part) = (names_of(&touched, selected), selected.len() < holds.grants.len());
            let cause =
                ChangeCause::Broken { names: names.iter().cloned().collect(), reason: reason.into(), part };
            if let Some(fence) = self.apply_change(&holds, selected, ops, &names, &cause).await? {
                if !part {
                    return Ok(fence);
                }
                touched = names;
            }
        }
    }

    async fn end_ops(&self, grant: &GrantKeys, base: u64) -> Result<Vec<RequestOp>> {
        let value = grant.keys.first().and_then(|entry| entry.value.as_ref());
        let delay =
            value.filter(|value| value.state == EntryState::Granted).map_or(0, |value| value.lock_delay_ms);
        let lease = match delay {
            0 => None,
            _ => {
                Some(self.client.connection.grant_lease(whole_seconds(Duration::from_millis(delay))).await?.0)
            }
        };
        Ok(grant.keys.iter().map(|key| end_op(key, lease, EntryState::Delayed, key.fence(base))).collect())
    }

    /// Reads all holds and lock-delays of a lock.
    pub async fn read_holds(&self, name: &LockName) -> Result<LockHolds> {
        let prefix = self.client.keys.lock_prefix(name);
        let (revision, mut ranges) = self.base.read_with(vec![range_oldest_first(&prefix)]).await?;
        let queue = QueueSnapshot::read(&self.client.keys, name, ranges.next().unwrap_or_default());
        let mut grants = Vec::new();
        for entry in queue.all.iter().filter(|entry| queue.holds(entry) || entry.is(EntryState::Delayed)) {
            let (mut keys, mut names) = (vec![entry.clone()], vec![name.clone()]);
            if entry.is(EntryState::Granted) {
                for other in self.other_names(entry, name).await? {
                    let Some(key_id) = entry.key_id else { continue };
                    let held = self.read_entry(&other, &key_id).await?;
                    keys.extend(held.filter(|held| held.is(EntryState::Granted)));
                    names.push(other);
                }
            }
            grants.push(GrantKeys { keys, names });
        }
        Ok(LockHolds { base: self.base.get(), grants, prefix, revision })
    }

    /// Changes the selected grants if no key of the lock, and none of their keys, was written since they were read.
    /// Returns the fence of the change. `None`: a key was written.
    pub async fn apply_change(
        &self,
        holds: &LockHolds,
        selected: &[GrantKeys],
        mut changes: Vec<RequestOp>,
        names: &BTreeSet<LockName>,
        cause: &ChangeCause,
    ) -> Result<Option<Fence>> {
        let mut compare = vec![
            base_unchanged(&self.client.keys, holds.base),
            unmodified_since(&holds.prefix, holds.revision),
        ];
        compare.extend(
            selected.iter().flat_map(|grant| &grant.keys).map(|key| modified_at(&key.key, key.modified)),
        );
        let cause_key = self.client.keys.change_cause();
        changes.push(put(&cause_key, cause.to_bytes(), 0));
        let mut conflicts: Vec<_> = names.iter().map(ConflictKey::new).collect();
        conflicts.push(ConflictKey::new(cause_key));
        let reply = self.client.batch.send(txn(compare, changes, Vec::new()), conflicts).await?;
        if !reply.txn.succeeded {
            return Ok(None);
        }
        let fence = fence_at(holds.base, reply.revision)?;
        self.base.note_fence(fence);
        Ok(Some(fence))
    }

    /// The other names of a grant, which is lost as a whole.
    async fn other_names(&self, entry: &QueueEntry, name: &LockName) -> Result<Vec<LockName>> {
        let (Some(value), Some(key_id)) = (&entry.value, entry.key_id) else { return Ok(Vec::new()) };
        let mut names = value.names.clone();
        if let Some(first) = &value.first {
            names = self
                .read_entry(first, &key_id)
                .await?
                .and_then(|entry| entry.value)
                .map_or(Vec::new(), |value| value.names);
        }
        names.retain(|other| other != name);
        Ok(names)
    }

    async fn read_entry(&self, name: &LockName, key_id: &KeyId) -> Result<Option<QueueEntry>> {
        let request = txn(Vec::new(), vec![get(&self.client.keys.entry_key(name, key_id))], Vec::new());
        let found = self.client.batch.send(request, Vec::new()).await?.txn.into_first_kv();
        Ok(found.and_then(|kv| QueueEntry::read(&self.client.keys, name, kv)))
    }
}

/// The names that a change affects, with those that earlier parts of it have affected.
pub fn names_of(touched: &BTreeSet<LockName>, selected: &[GrantKeys]) -> BTreeSet<LockName> {
    touched.iter().chain(selected.iter().flat_map(|grant| &grant.names)).cloned().collect()
}
