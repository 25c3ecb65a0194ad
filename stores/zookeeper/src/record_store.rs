//! The records as nodes: reads, and writes by compare-and-swap.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Result, Version, WriteOutcome,
};
use zookeeper_client as zk;

use crate::catch_up::CatchUp;
use crate::client::ZooKeeperClient;
use crate::codec::millis;
use crate::error::Failure;
use crate::fence_base::{FenceBase, KnownBase};
use crate::keys;
use crate::record_chunks::{ChunkStore, RecordHeader};
use crate::record_expiry::RecordExpiry;
use crate::session::{MultiReply, Session};
use crate::statements::{ANY, TxnOp, check, create, delete, set};

/// How many records are read at a time.
const READ_BATCH: usize = 64;
/// Added to a ttl, so that the record has certainly expired when it is deleted.
const EXPIRY_SLACK: Duration = Duration::from_millis(5);
/// The pause before a record whose chunks were missing is read again.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// How often one version of such a record is read again.
const MAX_MISSING_READS: u32 = 20;

/// The pause before a deletion that failed is tried again.
const EXPIRY_RETRY_DELAY: Duration = Duration::from_secs(5);

/// A record as it was read.
struct StoredRecord {
    record: Record,
    header: RecordHeader,
    /// The data version of its node.
    node_version: i32,
    /// Its ttl is over.
    expired: bool,
}

/// A record, and the data version of the parent of all records. Each deletion of a record writes the parent, so that a
/// record that was deleted and created again is not mistaken for the one that was read.
struct RecordSnapshot {
    base: KnownBase,
    parent: i32,
    found: Option<StoredRecord>,
}

impl RecordSnapshot {
    /// Whether this version of the record has expired.
    fn is_expired(&self, node_version: i32) -> bool {
        self.found.as_ref().is_some_and(|found| found.expired && found.node_version == node_version)
    }

    /// The version of the record as readers see it.
    fn version(&self) -> Option<Version> {
        self.alive().map(|found| found.record.version)
    }

    /// The record as readers see it.
    fn alive(&self) -> Option<&StoredRecord> {
        self.found.as_ref().filter(|found| !found.expired)
    }
}

/// Reads and changes records.
pub struct RecordStore {
    pub client: Arc<ZooKeeperClient>,
    pub base: Arc<FenceBase>,
    pub catch_up: Arc<CatchUp>,
    pub chunks: Arc<ChunkStore>,
    pub expiry: RecordExpiry,
}

impl RecordStore {
    /// Reads a record after the server has caught up with all others.
    async fn read_current(&self, session: &Arc<Session>, key: &LockName) -> Result<RecordSnapshot, Failure> {
        self.catch_up.catch_up(session).await?;
        self.read_from_server(session, key).await
    }

    /// Reads a record for a write that is rejected if the record has changed since, and that needs no catch-up then.
    /// An expectation is found not to be met only by a current read.
    async fn read_for_write(
        &self,
        session: &Arc<Session>,
        key: &LockName,
        expect: Expect,
    ) -> Result<RecordSnapshot, Failure> {
        let (synced, snapshot) = tokio::join!(session.sync(), self.read_from_server(session, key));
        synced?;
        match snapshot {
            Ok(snapshot) if expect.met_by(snapshot.version()) => Ok(snapshot),
            _ => self.read_current(session, key).await,
        }
    }

    /// Reads a record as the connected server knows it.
    async fn read_from_server(&self, session: &Session, key: &LockName) -> Result<RecordSnapshot, Failure> {
        let mut missing = (0, 0);
        loop {
            let (path, base, parent) =
                (self.client.keys.record(key), self.base.get(), self.client.keys.records());
            let stands = self.client.keys.base(base.number);
            // In this order: a deletion between the two reads then shows in the first.
            let (parent, base_is, read) =
                tokio::join!(session.get(&parent), session.get(&stands), session.get(&path));
            if Failure::if_exists(base_is)?.is_none() {
                self.base.refresh(session, false).await?;
                continue;
            }
            let Some((_, parent)) = Failure::if_exists(parent)? else {
                session
                    .create_with_parents(&self.client.keys.records(), self.client.connection.acls())
                    .await?;
                continue;
            };
            let Some((data, stat)) = Failure::if_exists(read)? else {
                return Ok(RecordSnapshot { base, parent: parent.version, found: None });
            };
            let (header, here) = RecordHeader::split(&data).unwrap_or((RecordHeader::default(), &data));
            let expired = match header.ttl_ms {
                Some(ttl) => {
                    stat.mtime.unsigned_abs().saturating_add(ttl)
                        <= self.client.ensemble_time(session).await?
                }
                None => false,
            };
            let Some(value) = self.chunks.read_chunks(session, key, &header, here).await? else {
                // The record was rewritten meanwhile, or an administrator has deleted some of its chunks.
                missing = if missing.0 == stat.mzxid { (stat.mzxid, missing.1 + 1) } else { (stat.mzxid, 1) };
                if missing.1 >= MAX_MISSING_READS {
                    let why = format!(
                        "chunks of the record {key} are missing: an administrator has deleted them. Write or delete the record"
                    );
                    return Err(Failure::NotSent(why));
                }
                tokio::time::sleep(RETRY_DELAY).await;
                continue;
            };
            let version = Version(base.number.saturating_add(stat.mzxid.unsigned_abs()));
            let record = Record { key: key.clone(), value, version };
            let found = StoredRecord { record, header, node_version: stat.version, expired };
            return Ok(RecordSnapshot { base, parent: parent.version, found: Some(found) });
        }
    }

    /// The checks that nothing has changed since the snapshot.
    fn unchanged_checks(&self, snapshot: &RecordSnapshot) -> Vec<TxnOp> {
        vec![self.base.check(snapshot.base), check(self.client.keys.records(), snapshot.parent)]
    }

    /// `None`: something changed meanwhile.
    async fn commit(&self, session: &Session, ops: &[TxnOp]) -> Result<Option<MultiReply>, Failure> {
        match self.client.write(session, ops).await {
            Ok(done) => Ok(Some(done)),
            Err(Failure::Rejected(0, zk::Error::NoNode | zk::Error::BadVersion)) => {
                self.base.refresh(session, false).await?;
                Ok(None)
            }
            Err(Failure::Rejected(_, zk::Error::NoNode | zk::Error::BadVersion | zk::Error::NodeExists)) => {
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    pub async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        mut expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let session = self.client.connection.session().await?;
        loop {
            let snapshot = self.read_for_write(&session, key, expect).await?;
            let alive = snapshot.alive().map(|found| found.record.clone());
            if !expect.met_by(alive.as_ref().map(|record| record.version)) {
                return Ok(WriteOutcome::Conflict(alive));
            }
            let (data, header) = self.chunks.write_chunks(&session, key, value, ttl.map(millis)).await?;
            let path = self.client.keys.record(key);
            let mut ops = self.unchanged_checks(&snapshot);
            // Only a set operation returns the zxid.
            ops.extend(snapshot.found.is_none().then(|| create(&path, Vec::new())));
            ops.push(set(&path, data, snapshot.found.as_ref().map_or(0, |found| found.node_version)));
            ops.extend(self.chunks.chunk_ops(
                key,
                snapshot.found.as_ref().map(|found| &found.header),
                Some(&header),
            ));
            let highest_fence_seen = self.base.highest_fence_seen();
            let Some(done) = self.commit(&session, &ops).await? else {
                self.chunks.delete_chunks(&session, key, &header).await;
                continue;
            };
            let Some(stat) = done.stat() else { continue };
            let version = snapshot.base.number.saturating_add(stat.mzxid.unsigned_abs());
            if version <= highest_fence_seen {
                // The ensemble was restored from an older state: write the record again over itself, with a higher
                // version.
                self.base.refresh(&session, true).await?;
                let number = self.base.get().number.saturating_add(stat.mzxid.unsigned_abs());
                expect = Expect::Version(Version(number));
                continue;
            }
            match ttl {
                Some(ttl) => {
                    self.expiry.schedule(key, self.client.clock.now() + ttl + EXPIRY_SLACK, stat.version)
                }
                None => self.expiry.cancel(key),
            }
            return Ok(WriteOutcome::Written(Version(version)));
        }
    }

    /// False: something changed meanwhile.
    async fn remove_record(
        &self,
        session: &Arc<Session>,
        key: &LockName,
        snapshot: &RecordSnapshot,
    ) -> Result<bool, Failure> {
        let Some(found) = &snapshot.found else { return Ok(true) };
        let mut ops = self.unchanged_checks(snapshot);
        ops.push(set(self.client.keys.records(), Vec::new(), ANY));
        ops.push(delete(self.client.keys.record(key), found.node_version));
        ops.extend(self.chunks.chunk_ops(key, Some(&found.header), None));
        let done = self.commit(session, &ops).await?.is_some();
        if done {
            self.expiry.cancel(key);
        }
        Ok(done)
    }

    /// Schedules the deletion of an expired record, whose writer may be gone.
    fn schedule_if_expired(&self, key: &LockName, snapshot: &RecordSnapshot) {
        if let Some(found) = snapshot.found.as_ref().filter(|found| found.expired) {
            self.expiry.schedule(key, self.client.clock.now(), found.node_version);
        }
    }

    pub async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let session = self.client.connection.session().await?;
        let snapshot = self.read_current(&session, key).await?;
        self.schedule_if_expired(key, &snapshot);
        Ok(snapshot.alive().map(|found| found.record.clone()))
    }

    pub async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        let session = self.client.connection.session().await?;
        loop {
            let snapshot = self.read_current(&session, key).await?;
            let Some(alive) = snapshot.alive() else { return Ok(DeleteOutcome::Absent) };
            if !expect.met_by(Some(alive.record.version)) {
                return Ok(DeleteOutcome::Conflict(alive.record.clone()));
            }
            if self.remove_record(&session, key, &snapshot).await? {
                return Ok(DeleteOutcome::Deleted);
            }
        }
    }

    pub async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let session = self.client.connection.session().await?;
        let records = self.client.keys.records();
        self.catch_up.catch_up(&session).await?;
        let found = Failure::if_exists(session.children(&records).await)?;
        let mut keys: Vec<LockName> =
            found.iter().flat_map(|(children, _)| children).filter_map(|child| keys::decode(child)).collect();
        keys.retain(|key| {
            key.as_str().starts_with(prefix) && page.after.as_ref().is_none_or(|after| key > after)
        });
        keys.sort();
        let mut records = Vec::new();
        for batch in keys.chunks(READ_BATCH) {
            for (key, snapshot) in
                batch.iter().zip(join_all(batch.iter().map(|key| self.read_from_server(&session, key))).await)
            {
                let snapshot = snapshot?;
                self.schedule_if_expired(key, &snapshot);
                records.extend(snapshot.alive().map(|found| found.record.clone()));
            }
            if records.len() > page.size() {
                break;
            }
        }
        let more = records.len() > page.size();
        records.truncate(page.size());
        let next = if more { records.last().map(|record| record.key.clone()) } else { None };
        Ok(RecordPage { records, next })
    }

    /// Deletes expired records for as long as the store is open.
    pub async fn run_expiry(self: Arc<Self>) {
        loop {
            let now = self.client.clock.now();
            let next = match self.expiry.due(now) {
                Ok((key, node_version)) => {
                    if let Err(failure) = self.remove_expired(&key, node_version).await {
                        tracing::debug!(
                            ?failure,
                            "failed to delete an expired record; it stays invisible, retrying"
                        );
                        self.expiry.schedule(
                            &key,
                            self.client.clock.now() + EXPIRY_RETRY_DELAY,
                            node_version,
                        );
                    }
                    continue;
                }
                Err(next) => next,
            };
            let pause = next.map_or(Duration::from_secs(3600), |next| next.since(now));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.expiry.changed() => {}
            }
        }
    }

    /// Deletes a record if it has this version and has expired.
    async fn remove_expired(&self, key: &LockName, node_version: i32) -> Result<(), Failure> {
        let session = self.client.connection.session().await?;
        let snapshot = self.read_current(&session, key).await?;
        if snapshot.is_expired(node_version) {
            self.remove_record(&session, key, &snapshot).await?;
        }
        Ok(())
    }
}
