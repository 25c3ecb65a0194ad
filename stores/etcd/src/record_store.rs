//! Records: small values with a version, stored beside the locks.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use lockkeeper_core::{
    DeleteOutcome, Error, Expect, LockName, Page, Record, RecordPage, Result, Version, WriteOutcome,
};

use crate::client::EtcdClient;
use crate::fence_base::FenceBase;
use crate::lease::whole_seconds;
use crate::proto::{Compare, Kv, RequestOp};
use crate::statements::{base_unchanged, created_at, delete, get, modified_at, put, txn};
use crate::txn_batch::{ConflictKey, TxnReply};

/// How many values a scan reads at a time. One has a megabyte at most.
const VALUES_AT_ONCE: usize = 8;
/// A page ends when its values have this many bytes.
const PAGE_BYTES: usize = 16 << 20;

/// The outcome of one operation on a record.
enum RecordStep {
    Applied(TxnReply),
    /// The record is not as the caller expected.
    Conflict(Option<Record>),
}

/// Reads and changes records.
pub struct RecordStore {
    pub client: Arc<EtcdClient>,
    pub base: Arc<FenceBase>,
}

impl RecordStore {
    fn record(&self, kv: Kv) -> Option<Record> {
        let key = self.client.keys.parse_record_key(&kv.key)?;
        Some(Record { key, value: kv.value, version: self.version(kv.mod_revision) })
    }

    fn version(&self, revision: i64) -> Version {
        Version(self.base.get().saturating_add(revision.unsigned_abs()))
    }

    /// Applies `op` in one transaction if the expectation is met, and reads the record in any case.
    async fn apply_record_op(&self, key: &LockName, expect: Expect, op: RequestOp) -> Result<RecordStep> {
        let stored_key = self.client.keys.record(key);
        loop {
            let (base, highest_fence_seen) = (self.base.get(), self.base.highest_fence_seen());
            let mut compare: Vec<Compare> = vec![base_unchanged(&self.client.keys, base)];
            match expect {
                Expect::Any => {}
                Expect::Absent => compare.push(created_at(&stored_key, 0)),
                // A version that no write of this store can have: nothing matches it.
                Expect::Version(Version(version)) => {
                    let revision = version.checked_sub(base).and_then(|n| i64::try_from(n).ok());
                    compare.push(modified_at(&stored_key, revision.filter(|n| *n > 0).unwrap_or(i64::MAX)));
                }
            }
            let request = txn(
                compare,
                vec![get(&stored_key), op.clone()],
                vec![get(&self.client.keys.fence_base()), get(&stored_key)],
            );
            let reply = self.client.batch.send(request, vec![ConflictKey::new(&stored_key)]).await?;
            if reply.txn.succeeded {
                return Ok(RecordStep::Applied(reply));
            }
            let revision = reply.revision;
            let mut found = reply.txn.into_ranges().into_iter().map(|range| range.kvs.into_iter().next());
            self.base.update(found.next().flatten().as_ref(), revision, highest_fence_seen).await?;
            let found_record = found.next().flatten().and_then(|kv| self.record(kv));
            if base == self.base.get() {
                return Ok(RecordStep::Conflict(found_record));
            }
        }
    }

    /// Deletes a record at the end of its ttl. etcd's leases are whole seconds, and at least two, so for a short ttl
    /// the lease alone would be much too long. Records with a long ttl are left to their lease: tasks that wait for
    /// the end of a month would pile up.
    fn delete_after(&self, stored_key: Vec<u8>, revision: i64, lease: i64, ttl: Duration) {
        let client = self.client.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ttl).await;
            let deletion =
                txn(vec![modified_at(&stored_key, revision)], vec![delete(&stored_key)], Vec::new());
            if client.batch.send(deletion, vec![ConflictKey::new(&stored_key)]).await.is_ok() {
                _ = client.connection.revoke_lease(lease).await;
            }
        });
    }

    /// Revokes a lease that no record uses. etcd would keep it until its ttl ends.
    fn revoke_in_background(&self, lease: i64) {
        if lease != 0 {
            let client = self.client.clone();
            tokio::spawn(async move { client.connection.revoke_lease(lease).await });
        }
    }

    pub async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let (lease, lasts) = match ttl {
            Some(ttl) => self.client.connection.grant_lease(whole_seconds(ttl)).await?,
            None => (0, Duration::ZERO),
        };
        let stored_key = self.client.keys.record(key);
        let reply = match self.apply_record_op(key, expect, put(&stored_key, value.to_vec(), lease)).await {
            Ok(RecordStep::Applied(reply)) => reply,
            Ok(RecordStep::Conflict(found)) => {
                self.revoke_in_background(lease);
                return Ok(WriteOutcome::Conflict(found));
            }
            // The record may have been written, and then it uses the lease.
            Err(error @ (Error::Unknown(_) | Error::Limited(_))) => return Err(error),
            Err(error) => {
                self.revoke_in_background(lease);
                return Err(error);
            }
        };
        let version = self.version(reply.revision);
        if let Some(ttl) = ttl.filter(|ttl| lasts > *ttl + *ttl / 8) {
            self.delete_after(stored_key, reply.revision, lease, ttl);
        }
        // The lease of the previous value is not used any more.
        self.revoke_in_background(reply.txn.into_first_kv().map_or(0, |kv| kv.lease));
        Ok(WriteOutcome::Written(version))
    }

    pub async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let (_, mut ranges) = self.base.read_with(vec![get(&self.client.keys.record(key))]).await?;
        let found = ranges.next().and_then(|range| range.kvs.into_iter().next());
        Ok(found.and_then(|kv| self.record(kv)))
    }

    pub async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        let stored_key = self.client.keys.record(key);
        match self.apply_record_op(key, expect, delete(&stored_key)).await? {
            RecordStep::Applied(reply) => Ok(match reply.txn.into_first_kv() {
                Some(deleted) => {
                    self.revoke_in_background(deleted.lease);
                    DeleteOutcome::Deleted
                }
                None => DeleteOutcome::Absent,
            }),
            RecordStep::Conflict(None) => Ok(DeleteOutcome::Absent),
            RecordStep::Conflict(Some(found)) => Ok(DeleteOutcome::Conflict(found)),
        }
    }

    pub async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.base.refresh().await?;
        // The keys first, without values: those of all records may be more than a client can read.
        let (found, revision) = self.client.read_keys(&self.client.keys.records()).await?;
        let mut keys: Vec<LockName> =
            found.iter().filter_map(|kv| self.client.keys.parse_record_key(&kv.key)).collect();
        keys.retain(|key| {
            key.as_str().starts_with(prefix) && page.after.as_ref().is_none_or(|after| *key > *after)
        });
        keys.sort();
        let last = keys.last().cloned();
        keys.truncate(page.size());
        let (mut records, mut bytes) = (Vec::new(), 0);
        let mut reads = stream::iter(
            keys.into_iter().map(|key| self.client.read_at(self.client.keys.record(&key), revision)),
        )
        .buffered(VALUES_AT_ONCE);
        while bytes < PAGE_BYTES
            && let Some(found) = reads.next().await
        {
            let record = found?.and_then(|kv| self.record(kv));
            bytes += record.as_ref().map_or(0, |record| record.value.len());
            records.extend(record);
        }
        let next = records.last().map(|record: &Record| record.key.clone());
        Ok(RecordPage { next: next.filter(|next| Some(next) != last.as_ref()), records })
    }
}
