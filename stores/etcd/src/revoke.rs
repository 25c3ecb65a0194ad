//! Revoking a lock: an operator tells its holders to release it. The reason is written into the keys of every grant, which stay
//! attached to their lease. The holder's next renewal finds the reason, and the holder's process ends the grant when
//! its lease is over.

use std::collections::BTreeSet;

use lockkeeper_core::{Error, Fence, LockName, Names, Result};
use lockkeeper_store_kit::admission::AdmissionEntry;

use crate::break_lock::{GrantKeys, LockBreaker, names_of};
use crate::client::EtcdClient;
use crate::codec::{EntryState, EntryValue};
use crate::error::Failure;
use crate::events::ChangeCause;
use crate::keys::KeyId;
use crate::proto::RequestOp;
use crate::queue::QueueEntry;
use crate::statements::{delete, get, nested, put, txn};
use crate::txn_batch::ConflictKey;

impl LockBreaker {
    /// Marks all grants of a lock as revoked. A lingering hold and a lock-delay are ended.
    pub async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let mut touched = BTreeSet::from([name.clone()]);
        loop {
            let mut holds = self.read_holds(name).await?;
            if holds.grants.iter().flat_map(|grant| &grant.keys).any(QueueEntry::is_foreign) {
                return Err(Error::Unsupported(format!(
                    "a foreign client holds {name}, and cannot be told to release it: break the lock without waiting for the \
                     holder"
                )));
            }
            // Marked before, perhaps by an earlier part of this call.
            let is_marked =
                |grant: &GrantKeys| grant.keys.iter().all(|entry| entry.revoked() == Some(reason));
            let (marked, rest): (Vec<_>, Vec<_>) = holds.grants.drain(..).partition(is_marked);
            touched = names_of(&touched, &marked);
            holds.grants = rest;
            let selected = &holds.grants[..holds.fitting_count()];
            let ops = selected
                .iter()
                .flat_map(|grant| &grant.keys)
                .map(|entry| mark_revoked(entry, holds.base, reason));
            let (names, part) = (names_of(&touched, selected), selected.len() < holds.grants.len());
            let cause =
                ChangeCause::Revoked { names: names.iter().cloned().collect(), reason: reason.into(), part };
            let done = self.apply_change(&holds, selected, ops.collect(), &names, &cause).await?;
            if let Some(fence) = done.filter(|_| !part) {
                return Ok(fence);
            }
        }
    }
}

/// The keys of a revoked grant: the revision that wrote each of them, and the reason. `None`: the grant does not
/// exist, or was not revoked.
pub async fn find_revoked(
    client: &EtcdClient,
    names: &Names,
    key_id: &KeyId,
    hash: &KeyId,
) -> Result<Option<(Vec<i64>, String)>, Failure> {
    // One nested transaction per name: 64 names would exceed etcd's limit of operations otherwise.
    let each = names
        .iter()
        .map(|name| nested(txn(Vec::new(), vec![get(&client.keys.entry_key(name, key_id))], Vec::new())));
    let ranges = client.read(each.collect(), ConflictKey::of_names(names)).await?;
    let mut found = Vec::new();
    for (name, range) in names.iter().zip(ranges) {
        let entry = range.kvs.into_iter().next().and_then(|kv| QueueEntry::read(&client.keys, name, kv));
        found.extend(entry.filter(|entry| entry.attempt.as_ref() == Some(hash) && entry.revoked().is_some()));
    }
    if found.len() != names.count() {
        return Ok(None);
    }
    let reason = found[0].revoked().unwrap_or_default().to_owned();
    Ok(Some((found.iter().map(|entry| entry.modified).collect(), reason)))
}

/// The operation that revokes one key.
fn mark_revoked(entry: &QueueEntry, base: u64, reason: &str) -> RequestOp {
    match &entry.value {
        Some(value) if value.state == EntryState::Granted => {
            let (fence, revoked) = (Some(entry.fence(base)), Some(reason.to_owned()));
            put(&entry.key, EntryValue { fence, revoked, ..value.clone() }.to_bytes(), entry.lease)
        }
        _ => delete(&entry.key),
    }
}
