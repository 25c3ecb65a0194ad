//! The fence base. A fence is this base plus the revision of the grant. The base is written once, from the clock, and
//! every granting transaction compares it. So fences begin at the clock, and keep growing even if an administrator
//! deletes everything in the cluster.

use std::sync::atomic::Ordering;

use lockkeeper_core::{Error, Fence, Result};

use crate::keys::Keys;
use crate::proto::{Compare, Kv};
use crate::statements::{created_at, get, put, txn, value_is};
use crate::store::EtcdShared;
use crate::txn_batch::ConflictKey;

/// The fence of a write at this revision.
pub fn fence_at(base: u64, revision: i64) -> Result<Fence> {
    let fence = base.saturating_add(revision.unsigned_abs());
    Fence::new(fence).map_err(|_| Error::Limited("the fences of this store are used up".into()))
}

/// Compares the base with this value.
pub fn base_unchanged(keys: &Keys, base: u64) -> Compare {
    value_is(&keys.fence_base(), &encode_base(base))
}

/// The version of everything that is stored below the prefix. It is part of the value that every granting transaction
/// compares, so processes of two versions never grant beside each other.
const FORMAT: &str = "v1 ";

fn encode_base(base: u64) -> Vec<u8> {
    format!("{FORMAT}{base}").into_bytes()
}

fn decode_base(kv: &Kv) -> Result<u64> {
    let text = std::str::from_utf8(&kv.value).ok();
    let number = text.and_then(|text| text.strip_prefix(FORMAT)?.parse::<u64>().ok());
    number.filter(|base| *base < 1 << 53).ok_or_else(|| {
        Error::Invalid(format!(
            "the key {:?} does not have the value that this version of Lockkeeper writes: another version or another \
             program uses this prefix. Use another prefix",
            String::from_utf8_lossy(&kv.key)
        ))
    })
}

impl EtcdShared {
    /// The base, as far as this process knows.
    pub fn base(&self) -> u64 {
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
    pub async fn update_base(
        &self,
        found: Option<&Kv>,
        revision: i64,
        highest_fence_seen: u64,
    ) -> Result<()> {
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
                    let clock = self.clock.wall().as_micros().min(Fence::MAX.get() / 2);
                    clock.saturating_sub(revision.unsigned_abs()).max(needed)
                }
            };
            let key = self.keys.fence_base();
            let same = match &found {
                None => created_at(&key, 0),
                Some(kv) => value_is(&key, &kv.value),
            };
            let write = txn(vec![same], vec![put(&key, encode_base(base), 0)], vec![get(&key)]);
            let reply = self.batch.send(write, vec![ConflictKey::new(key)]).await?;
            if reply.txn.succeeded {
                tracing::info!(base, "wrote the fence base");
                self.base.store(base, Ordering::Relaxed);
                return Ok(());
            }
            found = reply.txn.into_first_kv();
        }
    }

    /// Reads the base, and writes or raises it if necessary.
    pub async fn refresh_base(&self) -> Result<()> {
        let (key, highest_fence_seen) = (self.keys.fence_base(), self.highest_fence_seen());
        let reply = self.batch.send(txn(Vec::new(), vec![get(&key)], Vec::new()), Vec::new()).await?;
        let revision = reply.revision;
        self.update_base(reply.txn.into_first_kv().as_ref(), revision, highest_fence_seen).await
    }
}
