//! The fence base. A fence is this base plus the revision of the grant. The base is written once, from the clock, and
//! every granting transaction compares it. So fences begin at the clock, and keep growing even if an administrator
//! deletes everything in the cluster.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lockkeeper_core::{Error, Fence, Result};

use crate::client::EtcdClient;
use crate::codec::{decode_base, encode_base};
use crate::proto::{Kv, RangeResponse, RequestOp};
use crate::statements::{created_at, get, put, txn, value_is};
use crate::txn_batch::ConflictKey;

/// The fence of a write at this revision.
pub fn fence_at(base: u64, revision: i64) -> Result<Fence> {
    let fence = base.saturating_add(revision.unsigned_abs());
    Fence::new(fence).map_err(|_| Error::Limited("the fences of this store are used up".into()))
}

/// The fence base as this process knows it, and the fences that it has seen.
pub struct FenceBase {
    client: Arc<EtcdClient>,
    base: AtomicU64,
    highest_fence_seen: AtomicU64,
}

impl FenceBase {
    pub fn new(client: Arc<EtcdClient>) -> Self {
        FenceBase { client, base: AtomicU64::new(0), highest_fence_seen: AtomicU64::new(0) }
    }

    /// The base, as far as this process knows.
    pub fn get(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// The highest fence that this process has seen.
    pub fn highest_fence_seen(&self) -> u64 {
        self.highest_fence_seen.load(Ordering::Relaxed)
    }

    pub fn note_fence(&self, fence: Fence) {
        self.highest_fence_seen.fetch_max(fence.get(), Ordering::Relaxed);
    }

    /// Adopts the base that was found at `revision`. A missing base is written, and a base that would let a fence go
    /// back is raised: an administrator who deleted or restored it would else lock every fenced resource.
    /// `highest_fence_seen` was taken *before* the read, because grants since then are above what the read found.
    pub async fn update(&self, found: Option<&Kv>, revision: i64, highest_fence_seen: u64) -> Result<()> {
        let mut found = found.cloned();
        loop {
            let known = match &found {
                None => None,
                Some(kv) => Some(decode_base(kv)?),
            };
            // The next write has the next revision.
            let needed = highest_fence_seen.saturating_sub(revision.unsigned_abs());
            let base = match known {
                Some(base) if base >= needed => {
                    self.base.store(base, Ordering::Relaxed);
                    return Ok(());
                }
                _ => {
                    let clock = self.client.clock.wall().as_micros().min(Fence::MAX.get() / 2);
                    clock.saturating_sub(revision.unsigned_abs()).max(needed)
                }
            };
            let key = self.client.keys.fence_base();
            let same = match &found {
                None => created_at(&key, 0),
                Some(kv) => value_is(&key, &kv.value),
            };
            let write = txn(vec![same], vec![put(&key, encode_base(base), 0)], vec![get(&key)]);
            let reply = self.client.batch.send(write, vec![ConflictKey::new(key)]).await?;
            if reply.txn.succeeded {
                tracing::info!(base, "wrote the fence base");
                self.base.store(base, Ordering::Relaxed);
                return Ok(());
            }
            found = reply.txn.into_first_kv();
        }
    }

    /// Reads the base, and writes or raises it if necessary.
    pub async fn refresh(&self) -> Result<()> {
        self.read_with(Vec::new()).await.map(|_| ())
    }

    /// The same, with other reads in one transaction. Returns their results, and the revision at which they were read.
    pub async fn read_with(
        &self,
        reads: Vec<RequestOp>,
    ) -> Result<(i64, impl Iterator<Item = RangeResponse> + use<>)> {
        let highest_fence_seen = self.highest_fence_seen();
        let reads = [vec![get(&self.client.keys.fence_base())], reads].concat();
        let reply = self.client.batch.send(txn(Vec::new(), reads, Vec::new()), Vec::new()).await?;
        let revision = reply.revision;
        let mut ranges = reply.txn.into_ranges().into_iter();
        let found = ranges.next().and_then(|range| range.kvs.into_iter().next());
        self.update(found.as_ref(), revision, highest_fence_seen).await?;
        Ok((revision, ranges))
    }
}
