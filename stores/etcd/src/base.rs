//! Fences are revisions with a base added: a number that was written once, and that is compared in every transaction that
//! grants. So they begin where the clock is, and go on growing when everything in the cluster was deleted.

use std::sync::atomic::Ordering;

use lockkeeper_core::{Error, Fence, Result};

use crate::layout::Layout;
use crate::order::Topic;
use crate::proto::{Compare, Kv};
use crate::script::{created, get, put, says, txn};
use crate::store::Shared;

/// The fence of a write at this revision.
pub fn fence_at(base: u64, revision: i64) -> Result<Fence> {
    let fence = base.saturating_add(revision.unsigned_abs());
    Fence::new(fence).map_err(|_| Error::Limited("the fences of this store are used up".into()))
}

/// The base is still this one.
pub fn base_stands(layout: &Layout, base: u64) -> Compare {
    says(&layout.base(), base.to_string().as_bytes())
}

impl Shared {
    /// What is added to a revision, as far as we know.
    pub fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// The highest fence that we have seen.
    pub fn floor(&self) -> u64 {
        self.floor.load(Ordering::Relaxed)
    }

    pub fn note(&self, fence: Fence) {
        self.floor.fetch_max(fence.get(), Ordering::Relaxed);
    }

    /// Takes over the base as it was found at `revision`. One that is missing is made, and one that would let a fence go
    /// back is raised: whoever deleted or restored it did not mean to lock every fenced resource out. `floor` is the
    /// highest fence that had been seen before anybody looked: what was granted meanwhile is above what was found.
    pub async fn learn_base(&self, found: Option<&Kv>, revision: i64, floor: u64) -> Result<()> {
        let mut found = found.cloned();
        loop {
            let known = match &found {
                None => None,
                Some(kv) => {
                    let text = std::str::from_utf8(&kv.value).ok();
                    let number = text.and_then(|text| text.parse::<u64>().ok()).filter(|n| *n < 1 << 53);
                    Some(number.ok_or_else(|| {
                        Error::Invalid(format!(
                            "the key {:?} does not say what Lockkeeper wrote there: another prefix may help",
                            String::from_utf8_lossy(&kv.key)
                        ))
                    })?)
                }
            };
            // The next write has the next revision.
            let needed = floor.saturating_sub(revision.unsigned_abs());
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
            let key = self.layout.base();
            let same = match &found {
                None => created(&key, 0),
                Some(kv) => says(&key, &kv.value),
            };
            let write = txn(vec![same], vec![put(&key, base.to_string().into(), 0)], vec![get(&key)]);
            let answer = self.lane.send(write, vec![Topic::new(key)]).await?;
            if answer.txn.succeeded {
                tracing::info!(base, "the base of the fences was written");
                self.base.store(base, Ordering::Relaxed);
                return Ok(());
            }
            found = answer.txn.one();
        }
    }

    /// Reads it, and makes or raises it if need be.
    pub async fn refresh_base(&self) -> Result<()> {
        let (key, floor) = (self.layout.base(), self.floor());
        let answer = self.lane.send(txn(Vec::new(), vec![get(&key)], Vec::new()), Vec::new()).await?;
        let revision = answer.revision;
        self.learn_base(answer.txn.one().as_ref(), revision, floor).await
    }
}
