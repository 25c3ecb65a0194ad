//! The transactions of one acquire: try the lock, read the queues, take the lock, resume a grant; and the record of
//! the grant.

use std::sync::Arc;

use lockkeeper_core::{Fence, Grant, LockName, Result};
use lockkeeper_store_kit::OwnHold;
use lockkeeper_store_kit::admission::{AdmissionEntry, revoked_error};

use crate::acquire::{AcquireCall, AcquireStep, Acquirer, RETRY_DELAY};
use crate::admission;
use crate::client::EtcdClient;
use crate::codec::{EntryState, EntryValue};
use crate::error::Failure;
use crate::fence_base::fence_at;
use crate::hold_registry::{GrantRecord, KeyLocation};
use crate::key_slots::KeySlot;
use crate::keys::KeyId;
use crate::lease::EtcdLease;
use crate::proto::{Compare, RequestOp};
use crate::queue::{QueueEntry, QueueSnapshot};
use crate::release::SearchScope;
use crate::statements::{
    base_unchanged, created_at, first_keys, get, last_two, modified_at, nested, no_keys, put, range_by_value,
    txn, unmodified_since,
};
use crate::txn_batch::{ConflictKey, TxnReply};

/// How many holders of a long queue are read.
const MAX_HOLDERS_READ: i64 = 32;

impl AcquireCall<'_> {
    fn conflicts(&self) -> Vec<ConflictKey> {
        ConflictKey::of_names(&self.request.key.names)
    }

    fn key(&self, name: &LockName) -> Vec<u8> {
        self.acquirer.client.keys.entry_key(name, &self.attempt)
    }

    /// Writes this value under all names of the request.
    fn puts(&self, location: &KeyId, value: EntryValue, lease: i64) -> Vec<RequestOp> {
        let names = self.request.key.names.as_slice();
        let value = if *location == self.attempt { value } else { value.with_attempt(&self.attempt) };
        let key = |name| self.acquirer.client.keys.entry_key(name, location);
        names.iter().map(|name| put(&key(name), value.value_under(name, names), lease)).collect()
    }

    fn value(&self, state: EntryState, fence: Option<Fence>) -> EntryValue {
        EntryValue::new(self.request, state, fence, self.acquirer.client.clock.wall())
    }

    /// Reads a long queue in two parts: its holders, wherever they are, and its end, with the predecessor of this
    /// request. The beginning of the queue would not be enough: an owner that re-enters holds behind all waiters that
    /// were there before it.
    fn read(&self, name: &LockName) -> Vec<RequestOp> {
        let prefix = self.acquirer.client.keys.lock_prefix(name);
        let limit = if self.read_all { 0 } else { MAX_HOLDERS_READ };
        let mut reads = vec![
            range_by_value(&prefix, limit),
            last_two(&prefix, if self.queued { self.created } else { 0 }),
        ];
        if admission::reads_ends(self.request) {
            // Its own entries, if it was granted before: in a key slot, which is the oldest, or under its own key.
            reads.extend([first_keys(&prefix, 1), get(&self.key(name))]);
        }
        reads
    }

    /// Reads the queues for a request that is queued.
    pub async fn read_queues(&self) -> Result<TxnReply, Failure> {
        let mut read_queues = vec![get(&self.acquirer.client.keys.fence_base())];
        // One nested transaction per name: 64 names would exceed etcd's limit of operations otherwise.
        let names = &self.request.key.names;
        read_queues.extend(names.iter().map(|name| nested(txn(Vec::new(), self.read(name), Vec::new()))));
        // Read-only: no need to wait for other transactions of this process about the same name.
        self.acquirer.client.batch.send(txn(Vec::new(), read_queues, Vec::new()), Vec::new()).await
    }

    /// Enqueues the request if it may wait, and reads the queues after that.
    async fn enqueue_ops(&self) -> Result<Vec<RequestOp>, Failure> {
        let names = self.request.key.names.as_slice();
        let Acquirer { client, leases, .. } = self.acquirer;
        let mut read_queues = vec![get(&client.keys.fence_base())];
        let queue = if self.enqueues { Some(leases.queue_lease(self.request.ttl).await?) } else { None };
        let waiting = self.value(EntryState::Waiting, None);
        for name in names {
            let read = self.read(name);
            read_queues.push(nested(match &queue {
                None => txn(Vec::new(), read, Vec::new()),
                Some(queue) => {
                    let key = self.key(name);
                    let write = put(&key, waiting.value_under(name, names), queue.id);
                    txn(vec![created_at(&key, 0)], [vec![write], read.clone()].concat(), read)
                }
            }));
        }
        Ok(read_queues)
    }

    /// Writes a grant in a key slot if no other key of the lock exists.
    pub async fn try_slot(
        &self,
        lease: &EtcdLease,
        base: u64,
    ) -> Result<(TxnReply, Option<KeySlot>), Failure> {
        let Acquirer { client, slots, .. } = self.acquirer;
        let slot = slots.take(&self.request.key.names);
        let (free, grant) = self.grant_if_free(&slot, lease);
        // If this future is dropped, or no reply comes, the slot's generation is retired.
        let reply = client.batch.send_optimistic(free, grant, Some(base), self.conflicts()).await;
        slot_outcome(reply, slot)
    }

    /// Tries a key slot, and enqueues in the same transaction if the lock is not free.
    pub async fn try_or_enqueue(
        &self,
        lease: &EtcdLease,
        base: u64,
    ) -> Result<(TxnReply, Option<KeySlot>), Failure> {
        let enqueue_ops = self.enqueue_ops().await?;
        let slot = self.acquirer.slots.take(&self.request.key.names);
        let (mut free, grant) = self.grant_if_free(&slot, lease);
        free.push(base_unchanged(&self.acquirer.client.keys, base));
        let reply = self.acquirer.client.batch.send(txn(free, grant, enqueue_ops), self.conflicts()).await;
        slot_outcome(reply, slot)
    }

    fn grant_if_free(&self, slot: &KeySlot, lease: &EtcdLease) -> (Vec<Compare>, Vec<RequestOp>) {
        let names = self.request.key.names.iter();
        let free = names.map(|name| no_keys(&self.acquirer.client.keys.lock_prefix(name))).collect();
        (free, self.puts(&slot.key_id(), self.value(EntryState::Granted, None), lease.id))
    }

    /// Takes a lock that was free at `revision`, unless any of its keys was written since. A deletion since then only
    /// matters to this request: so the transaction compares its own queue entry, because a foreign client may have
    /// moved up behind it; and for a re-entry, the hold with `fence` that it re-enters.
    pub async fn take_lock(
        &mut self,
        lease: &Arc<EtcdLease>,
        queues: &[QueueSnapshot],
        revision: i64,
        fence: Option<Fence>,
        highest_fence_seen: u64,
    ) -> Result<AcquireStep> {
        let acquirer = self.acquirer;
        let EtcdClient { keys, batch, .. } = &*acquirer.client;
        let base = acquirer.base.get();
        let mut compare = vec![base_unchanged(keys, base)];
        for (i, queue) in queues.iter().enumerate() {
            let prefix = keys.lock_prefix(&queue.name);
            compare.push(unmodified_since(&prefix, revision));
            if i == 0 || queue.all.iter().any(|entry| entry.is_foreign()) {
                let location = queue.entry_of(&self.attempt).map_or(0, |entry| entry.created);
                compare.push(created_at(&self.key(&queue.name), location));
            }
        }
        compare.extend(fence.map_or(Vec::new(), |fence| self.reentry_unchanged(queues, base, fence)));
        let grant = self.puts(&self.attempt, self.value(EntryState::Granted, fence), lease.id);
        let request_txn = txn(compare, grant, vec![get(&keys.fence_base())]);
        let reply = match batch.send(request_txn, self.conflicts()).await {
            Err(failure) if failure.lease_is_gone() => {
                acquirer.leases.check_leases(lease).await?;
                return Ok(AcquireStep::Retry);
            }
            reply => reply.map_err(|failure| self.note_failure(failure))?,
        };
        if !reply.txn.succeeded {
            return Ok(AcquireStep::Retry);
        }
        let granted_fence = match fence {
            Some(fence) => fence,
            None => fence_at(base, reply.revision)?,
        };
        // A re-entry keeps the fence that its owner has.
        let highest_fence_seen = if fence.is_some() { 0 } else { highest_fence_seen };
        self.record_grant(lease, self.attempt.into(), &reply, granted_fence, highest_fence_seen, fence).await
    }

    /// Compares the hold that this request re-enters. A grant of several names ends as a whole, so one of its keys is
    /// compared for all: with 64 names there would be more comparisons than etcd allows.
    fn reentry_unchanged(&self, queues: &[QueueSnapshot], base: u64, fence: Fence) -> Vec<Compare> {
        let mut seen: Vec<(Option<KeyId>, i64)> = Vec::new();
        let mut compare = Vec::new();
        let views: Vec<_> = self.views(queues).collect();
        for entry in views.iter().filter_map(|view| view.find_reentered(self.request, base, fence)) {
            if !seen.contains(&(entry.key_id, entry.modified)) {
                seen.push((entry.key_id, entry.modified));
                compare.push(modified_at(&entry.key, entry.modified));
            }
        }
        compare
    }

    /// This attempt already holds the lock: renew its lease.
    pub async fn resume_grant(
        &mut self,
        lease: &Arc<EtcdLease>,
        reply: &TxnReply,
        queues: &[QueueSnapshot],
        fence: Fence,
    ) -> Result<AcquireStep> {
        if self.acquirer.registry.table().ending.contains(&self.attempt) {
            // The grant expired before this call, and the process is about to end it.
            tokio::time::sleep(RETRY_DELAY).await;
            return Ok(AcquireStep::Retry);
        }
        let own: Vec<_> = queues.iter().filter_map(|queue| queue.entry_of(&self.attempt)).collect();
        self.leave_duplicate_entry(queues, &own).await?;
        if let Some(reason) = own.iter().find_map(|entry| entry.revoked()) {
            return Err(revoked_error(reason));
        }
        let (at, location) = (own[0].modified, self.location_of(own[0]));
        // If an outcome is unknown, a request to end the grant may still be in flight. Write the keys again, so that
        // its comparison fails.
        let outcome_unknown =
            self.acquirer.registry.table().holds.get(&self.attempt).is_some_and(|hold| hold.outcome_unknown);
        if !outcome_unknown && own.iter().all(|entry| entry.lease == lease.id && entry.modified == at) {
            let stored_fence = own[0].value.as_ref().and_then(|value| value.fence);
            let reply = TxnReply { revision: at, ..reply.clone() };
            return self.record_grant(lease, location, &reply, fence, 0, stored_fence).await;
        }
        // The grant is attached to a lease of another process, or to an old one.
        let same = own.iter().map(|entry| modified_at(&entry.key, entry.modified)).collect();
        let grant = self.puts(&location.key_id, self.value(EntryState::Granted, Some(fence)), lease.id);
        let reply = self.acquirer.client.batch.send(txn(same, grant, Vec::new()), self.conflicts()).await;
        let reply = reply.map_err(|failure| self.note_failure(failure))?;
        match reply.txn.succeeded {
            true => self.record_grant(lease, location, &reply, fence, 0, Some(fence)).await,
            false => Ok(AcquireStep::Retry),
        }
    }

    /// Where a key of this attempt is. The slot belongs to this process if the registry knows it.
    fn location_of(&self, entry: &QueueEntry) -> KeyLocation {
        let attempt = entry.key_id.unwrap_or(self.attempt);
        let table = self.acquirer.registry.table();
        let grant = table.holds.get(&self.attempt).and_then(|hold| hold.grant.as_ref());
        let location = grant.map(|grant| &grant.location).filter(|location| location.key_id == attempt);
        location.cloned().unwrap_or_else(|| attempt.into())
    }

    /// Leaves the queue if this attempt was granted the lock in a slot without hearing of it, tried again, and
    /// enqueued behind itself.
    async fn leave_duplicate_entry(
        &self,
        queues: &[QueueSnapshot],
        own: &[&QueueEntry],
    ) -> Result<(), Failure> {
        let mut behind = queues.iter().flat_map(|queue| &queue.all).filter(|entry| {
            entry.attempt == Some(self.attempt) && own.iter().all(|grant| grant.key != entry.key)
        });
        if behind.next().is_some() && own.iter().all(|entry| entry.key_id != Some(self.attempt)) {
            self.end(SearchScope::OwnKey).await?;
        }
        Ok(())
    }

    /// Records the grant, and ensures that the lease lasts for as long as the guard relies on it.
    pub async fn record_grant(
        &mut self,
        lease: &Arc<EtcdLease>,
        location: KeyLocation,
        reply: &TxnReply,
        fence: Fence,
        highest_fence_seen: u64,
        stored_fence: Option<Fence>,
    ) -> Result<AcquireStep> {
        let (acquirer, request, sent_at) = (self.acquirer, self.request, reply.sent_at);
        let mut value = self.value(EntryState::Granted, stored_fence);
        if location.key_id != self.attempt {
            value = value.with_attempt(&self.attempt);
        }
        let grant = GrantRecord { location, written: reply.revision, fence, lease: lease.clone(), value };
        let hold = OwnHold::granted(&request.key.names, request.ttl, sent_at, grant);
        acquirer.registry.insert(self.attempt, hold);
        if fence.get() <= highest_fence_seen {
            // The cluster was restored to an older state. Raise the base, and do not count this grant.
            Box::pin(acquirer.releaser.release_attempt(&request.key.names, self.attempt)).await?;
            Box::pin(acquirer.base.refresh()).await?;
            self.queued = false;
            return Ok(AcquireStep::Retry);
        }
        if !acquirer.leases.ensure_valid_until(lease, sent_at + request.ttl + request.lock_delay).await? {
            self.queued = false;
            return Ok(AcquireStep::Retry);
        }
        acquirer.base.note_fence(fence);
        let (key, mode, ttl) = (request.key.clone(), request.mode, request.ttl);
        Ok(AcquireStep::Granted(Grant { key, fence, mode, ttl, sent_at, lease: ttl }))
    }
}

/// Whether the attempt was granted the lock in its slot. If the outcome is unknown, the slot is dropped, which retires
/// its generation.
fn slot_outcome(
    reply: Result<TxnReply, Failure>,
    slot: KeySlot,
) -> Result<(TxnReply, Option<KeySlot>), Failure> {
    match reply {
        Ok(reply) if reply.txn.succeeded => Ok((reply, Some(slot))),
        Err(failure) if failure.may_be_applied() => Err(failure),
        reply => {
            slot.release();
            Ok((reply?, None))
        }
    }
}
