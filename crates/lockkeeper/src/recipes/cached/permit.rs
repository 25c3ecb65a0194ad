//! The right to compute a value: [`RefreshPermit`] stores the value, or says that it could not be computed.

use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Fence, Result};

use super::record::{CachedRecord, FailureMark, StoredValue};
use super::view::{CachedRecords, wall_ms};
use super::{Cached, CachedValue, PutOutcome, early};
use crate::guard::Guard;
use crate::recipes::cas_record::{CasRecord, Retry, Snapshot};

/// How much longer than its record the store keeps a value that is outside of it, for callers that have
/// read the record.
const LONGER: Duration = Duration::from_secs(60);
/// The most bytes of the error of a failed refresh that are kept.
const ERROR_BYTES: usize = 4096;

/// The right to compute the value of a key, with a fence. Dropping it lets the next caller do it.
#[must_use = "dropping a permit lets the next caller compute the value"]
#[derive(Debug)]
pub struct RefreshPermit {
    cached: Cached,
    records: CachedRecords,
    guard: Guard,
    /// The record that the new value replaces.
    base: Snapshot,
    started: BootInstant,
}

impl RefreshPermit {
    pub(super) fn new(cached: Cached, records: CachedRecords, guard: Guard, base: Snapshot) -> Self {
        let started = cached.keeper.0.clock.now();
        RefreshPermit { cached, records, guard, base, started }
    }

    /// The fence (the fencing token): the number to send with every write.
    pub fn fence(&self) -> Fence {
        self.guard.fence()
    }

    /// The lock of the refresh, which reports when it is lost.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    pub(super) fn cas_record(&self) -> &CasRecord {
        &self.records.value
    }

    /// Stores the value, says that it is fresh, and releases the lock.
    ///
    /// The record decides, not the lease: a late value counts if no newer one was stored. If one was, the
    /// answer is [`Error::Stale`], and the newer value stays. [`Error::Limited`] if the value has more than
    /// 64 MiB. After any error the value is not in the cache, or is not known to be fresh, and the next
    /// caller computes it again.
    pub async fn finish(self, value: &[u8]) -> Result<()> {
        let stored = self.store(value).await;
        self.release_lock().await;
        stored
    }

    /// Says that the value could not be computed: no caller tries again until the back-off is over. The old
    /// value stays. Releases the lock, and returns the old value if this caller may use it.
    pub async fn fail(self, error: &str) -> Result<Option<CachedValue<Vec<u8>>>> {
        let mark = FailureMark {
            fence: self.fence(),
            error: error[..error.floor_char_boundary(ERROR_BYTES)].to_owned(),
            negative: self.cached.negative.is_some(),
        };
        let back_off = self.cached.negative.unwrap_or(self.cached.back_off);
        let marked = self.records.mark_failed(&mark, back_off).await;
        if let Err(error) = marked {
            tracing::warn!(%error, key = self.cached.key, "a failed refresh could not be recorded; the next caller tries again at once");
        }
        let old = self.old_value().await;
        self.release_lock().await;
        Ok(old?.map(|old| CachedValue { refresh_error: Some(error.to_owned()), ..old }))
    }

    /// Gives the permit back when the lease ends, and not at once as when it is dropped: see [`Guard::let_expire`].
    pub fn let_expire(self) {
        self.guard.let_expire();
    }

    /// The value that is there now, if this caller may use it.
    async fn old_value(&self) -> Result<Option<CachedValue<Vec<u8>>>> {
        self.cached.usable(&self.records, &self.records.look().await?).await
    }

    async fn release_lock(self) {
        // If the lock is lost or the release fails, its lease ends the lock.
        let _ = self.guard.release().await;
    }

    async fn store(&self, value: &[u8]) -> Result<()> {
        let clock = &self.cached.keeper.0.clock;
        let life = early::life(self.cached.ttl, self.cached.jitter, early::random_unit());
        let keep = self.cached.ttl.saturating_add(self.cached.stale);
        let took = clock.now().since(self.started);
        let (parts, body) = self.put(value, keep.saturating_add(LONGER)).await?;
        let record = CachedRecord {
            fence: self.fence(),
            value: Some(StoredValue {
                size: value.len(),
                parts,
                external: self.cached.cache.is_some(),
                made_ms: wall_ms(&self.cached.keeper),
                took_ms: millis(took),
                life_ms: millis(life),
            }),
        };
        let replaced = match self.replace(&record.bytes(body), keep).await {
            Ok(replaced) => replaced,
            Err(error) => {
                if matches!(error, Error::Stale { .. } | Error::Lost(_)) {
                    self.records.chunks(self.fence()).delete(parts).await;
                }
                return Err(error);
            }
        };
        self.records.mark_fresh(self.fence(), life).await?;
        self.delete_chunks_of(&replaced).await;
        Ok(())
    }

    /// Puts the value into the user's cache, or into records of its own if it is large. Returns the number
    /// of these records, and the bytes that belong into the record of the key.
    async fn put<'a>(&self, value: &'a [u8], keep: Duration) -> Result<(usize, &'a [u8])> {
        let Some(cache) = &self.cached.cache else {
            return self.records.chunks(self.fence()).write(value, keep, Retry::Briefly).await;
        };
        match cache.put(&self.cached.key, value, self.fence(), keep).await? {
            PutOutcome::Stored => Ok((0, &[])),
            PutOutcome::Stale(seen) => Err(Error::Stale { presented: self.fence(), seen }),
        }
    }

    /// Replaces the record, unless it has a newer fence. Returns the record that was replaced.
    async fn replace(&self, bytes: &[u8], keep: Duration) -> Result<Snapshot> {
        let mut base = self.base.clone();
        loop {
            match self.records.value.swap(Some(&base), bytes, Some(keep), Retry::Briefly).await? {
                Ok(_) => return Ok(base),
                Err(Some(found)) => {
                    let (record, _) = CachedRecord::parse(&self.cached.key, &found.value)?;
                    if record.fence > self.fence() {
                        return Err(Error::Stale { presented: self.fence(), seen: record.fence });
                    }
                    base = found;
                }
                // The old value ended during the work. As at the beginning of a first value: only a caller
                // that still holds the lock may go on, and by a version.
                Err(None) => {
                    let (claim, ttl) = self.cached.first_claim(&self.guard);
                    let claim = self.records.value.swap(None, &claim, ttl, Retry::Briefly);
                    if let Ok(claimed) = self.guard.run(claim).await?? {
                        base = claimed;
                    }
                }
            }
        }
    }

    /// Deletes the chunks of a value that was replaced: no record refers to them any more.
    async fn delete_chunks_of(&self, replaced: &Snapshot) {
        let Ok((record, _)) = CachedRecord::parse(&self.cached.key, &replaced.value) else { return };
        if let Some(value) = record.value {
            self.records.chunks(record.fence).delete(value.parts).await;
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
