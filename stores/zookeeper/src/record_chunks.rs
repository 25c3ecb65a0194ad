//! Records that are too long for one node. ZooKeeper accepts a little less than 1 MiB in one request, so long values
//! are split into chunks, which are written before the record that names them. The transaction that names chunks
//! checks that they exist, and deletes those of the previous value. So chunks that no record names can be deleted at
//! any time.

use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{Error, LockName, Result};
use lockkeeper_host::random_128;
use serde::{Deserialize, Serialize};
use zookeeper_client::{self as zk, CreateMode};

use crate::client::ZooKeeperClient;
use crate::error::Failure;
use crate::keys::Keys;
use crate::session::Session;
use crate::statements::{ANY, TxnOp, check, create, delete};

/// How many chunks are deleted in one transaction.
const DELETE_BATCH: usize = 64;
/// The size of a chunk.
const CHUNK_BYTES: usize = 512 << 10;

/// The header before the value in a record's node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RecordHeader {
    /// How long the record lives after its last write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// The chunks that contain the value, if it is not in this node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<String>,
}

impl RecordHeader {
    /// One line of JSON, then the value.
    pub fn with(&self, value: &[u8]) -> Vec<u8> {
        let mut data = serde_json::to_vec(self).unwrap_or_default();
        data.push(b'\n');
        data.extend_from_slice(value);
        data
    }

    pub fn split(data: &[u8]) -> Option<(RecordHeader, &[u8])> {
        let end = data.iter().position(|byte| *byte == b'\n')?;
        Some((serde_json::from_slice(&data[..end]).ok()?, &data[end + 1..]))
    }
}

impl RecordHeader {
    /// The paths of its chunks.
    fn paths(&self, keys: &Keys, key: &LockName) -> impl Iterator<Item = String> {
        let dir = keys.chunks_of(key);
        self.chunks.iter().map(move |chunk| format!("{dir}/{chunk}"))
    }
}

/// Reads and writes the chunks of long records.
pub struct ChunkStore {
    pub client: Arc<ZooKeeperClient>,
}

impl ChunkStore {
    /// The operations on chunks in the transaction that replaces `old` by `new`.
    pub fn chunk_ops(
        &self,
        key: &LockName,
        old: Option<&RecordHeader>,
        new: Option<&RecordHeader>,
    ) -> Vec<TxnOp> {
        let named =
            new.into_iter().flat_map(|new| new.paths(&self.client.keys, key)).map(|path| check(path, ANY));
        let obsolete =
            old.into_iter().flat_map(|old| old.paths(&self.client.keys, key)).map(|path| delete(path, ANY));
        named.chain(obsolete).collect()
    }

    /// Writes the chunks of a value, and returns the content of the record's node. A caller that fails to write the
    /// record deletes the chunks again.
    pub async fn write_chunks(
        &self,
        session: &Session,
        key: &LockName,
        value: &[u8],
        ttl_ms: Option<u64>,
    ) -> Result<(Vec<u8>, RecordHeader)> {
        let mut header = RecordHeader { ttl_ms, chunks: Vec::new() };
        if value.len() <= CHUNK_BYTES {
            return Ok((header.with(value), header));
        }
        // A random prefix, because the sequence begins again when the servers have removed the parent.
        let prefix = format!("c-{:016x}-", u128::from_be_bytes(random_128()) as u64);
        for chunk in value.chunks(CHUNK_BYTES) {
            match self.write_chunk(session, key, &prefix, chunk).await {
                Ok(name) => header.chunks.push(name),
                Err(failure) => {
                    self.delete_chunks(session, key, &header).await;
                    // A chunk without a record changes nothing that a reader can see.
                    return Err(match Error::from(failure) {
                        Error::Unknown(text) => Error::Unavailable(text),
                        error => error,
                    });
                }
            }
        }
        Ok((header.with(&[]), header))
    }

    async fn write_chunk(
        &self,
        session: &Session,
        key: &LockName,
        prefix: &str,
        chunk: &[u8],
    ) -> Result<String, Failure> {
        let (dir, acls) = (self.client.keys.chunks_of(key), self.client.connection.acls());
        let mode = CreateMode::PersistentSequential.with_acls(acls);
        let mut tries = 0;
        loop {
            match session.call(session.client.create(&format!("{dir}/{prefix}"), chunk, &mode)).await {
                Ok((_, number)) => return Ok(format!("{prefix}{number}")),
                // The servers may remove the empty parent at this moment.
                Err(failure) if failure.is(&zk::Error::NoNode) && tries < 3 => tries += 1,
                Err(failure) => return Err(failure),
            }
            session.create_with_parents(&self.client.keys.chunks(), acls).await?;
            session.create_container(&dir, acls).await?;
        }
    }

    /// Reads the value of a record. `None`: a chunk is missing, because the record was rewritten meanwhile.
    pub async fn read_chunks(
        &self,
        session: &Session,
        key: &LockName,
        header: &RecordHeader,
        here: &[u8],
    ) -> Result<Option<Vec<u8>>, Failure> {
        if header.chunks.is_empty() {
            return Ok(Some(here.to_vec()));
        }
        let paths: Vec<String> = header.paths(&self.client.keys, key).collect();
        let mut value = Vec::new();
        for chunk in join_all(paths.iter().map(|path| session.get(path))).await {
            match chunk {
                Ok((data, _)) => value.extend(data),
                Err(failure) if failure.is(&zk::Error::NoNode) => return Ok(None),
                Err(failure) => return Err(failure),
            }
        }
        Ok(Some(value))
    }

    /// Deletes chunks that no record names.
    pub async fn delete_chunks(&self, session: &Session, key: &LockName, header: &RecordHeader) {
        for path in header.paths(&self.client.keys, key) {
            _ = session.delete(&path).await;
        }
    }

    /// Deletes the chunks of a key that its record does not name and that were written before `since` by the
    /// ensemble's clock. Their writer died or lost its connection before it could name or delete them.
    pub async fn sweep_chunks(&self, session: &Session, key: &LockName, since: u64) -> Result<(), Failure> {
        let (dir, path) = (self.client.keys.chunks_of(key), self.client.keys.record(key));
        let Some((children, _)) = Failure::if_exists(session.children(&dir).await)? else { return Ok(()) };
        let Some((_, above)) = Failure::if_exists(session.get(&self.client.keys.records()).await)? else {
            return Ok(());
        };
        let record = Failure::if_exists(session.get(&path).await)?;
        let named = record
            .as_ref()
            .and_then(|(data, _)| Some(RecordHeader::split(data)?.0.chunks))
            .unwrap_or_default();
        let mut gone = Vec::new();
        for child in children.iter().filter(|child| !named.contains(*child)) {
            let chunk = format!("{dir}/{child}");
            let stat = session.call(session.client.check_stat(&chunk)).await?;
            gone.extend(stat.filter(|stat| stat.ctime.unsigned_abs() < since).map(|_| delete(chunk, ANY)));
        }
        for some in gone.chunks(DELETE_BATCH) {
            // Only if the record has not changed since it was read: its writer may be about to name these chunks. A
            // record that does not exist is created and deleted again, so that the transaction fails if there is one.
            let mut ops = vec![check(self.client.keys.records(), above.version)];
            match &record {
                Some((_, stat)) => ops.push(check(&path, stat.version)),
                None => ops.extend([create(&path, Vec::new()), delete(&path, ANY)]),
            }
            ops.extend_from_slice(some);
            match session.multi(&ops).await {
                Ok(_) | Err(Failure::Rejected(..)) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }
}
