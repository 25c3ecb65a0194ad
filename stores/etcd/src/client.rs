//! The access to etcd that all parts of the store share, and reads outside of transactions.

use std::sync::Arc;

use lockkeeper_host::Clock;

use crate::batch::BatchSender;
use crate::connection::Connection;
use crate::error::Failure;
use crate::keys::Keys;
use crate::proto::{Kv, RangeRequest, RangeResponse, RequestOp};
use crate::statements::{range_end_of, txn};
use crate::txn_batch::ConflictKey;

/// How many keys one range request reads.
const PAGE_KEYS: i64 = 1000;

/// The keys, the clock, and the two ways to send a request: alone, or in a batch with those of other tasks.
pub struct EtcdClient {
    pub keys: Keys,
    pub clock: Arc<dyn Clock>,
    pub connection: Arc<Connection>,
    pub batch: BatchSender,
}

impl EtcdClient {
    /// Reads in one transaction. With conflict keys: after the transactions of this process that have the same.
    pub async fn read(
        &self,
        reads: Vec<RequestOp>,
        conflicts: Vec<ConflictKey>,
    ) -> Result<Vec<RangeResponse>, Failure> {
        Ok(self.batch.send(txn(Vec::new(), reads, Vec::new()), conflicts).await?.txn.into_ranges())
    }

    /// Reads all keys with this prefix at one revision, page by page.
    pub async fn read_prefix(&self, prefix: &[u8]) -> Result<Vec<Kv>, Failure> {
        let (found, _) = self.read_range(prefix.to_vec(), range_end_of(prefix), 0, false).await?;
        Ok(found)
    }

    /// Reads all keys with this prefix without their values, and returns the revision.
    pub async fn read_keys(&self, prefix: &[u8]) -> Result<(Vec<Kv>, i64), Failure> {
        self.read_range(prefix.to_vec(), range_end_of(prefix), 0, true).await
    }

    /// Reads one key as it was at `revision`.
    pub async fn read_at(&self, key: Vec<u8>, revision: i64) -> Result<Option<Kv>, Failure> {
        let range = RangeRequest { key, revision, ..RangeRequest::default() };
        let reply: RangeResponse = self.connection.call("/etcdserverpb.KV/Range", &range).await?;
        Ok(reply.kvs.into_iter().next())
    }

    /// Reads the keys from `key` to `range_end` at `revision` (zero: now), and returns the revision.
    pub async fn read_range(
        &self,
        mut key: Vec<u8>,
        range_end: Vec<u8>,
        mut revision: i64,
        keys_only: bool,
    ) -> Result<(Vec<Kv>, i64), Failure> {
        let mut found: Vec<Kv> = Vec::new();
        loop {
            let range_end = range_end.clone();
            let range = RangeRequest {
                key,
                range_end,
                limit: PAGE_KEYS,
                revision,
                keys_only,
                ..RangeRequest::default()
            };
            let reply: RangeResponse = self.connection.call("/etcdserverpb.KV/Range", &range).await?;
            if revision == 0 {
                revision = reply.header.map_or(0, |header| header.revision);
            }
            found.extend(reply.kvs);
            match found.last() {
                Some(last) if reply.more => key = [&last.key[..], &[0]].concat(),
                _ => return Ok((found, revision)),
            }
        }
    }
}
