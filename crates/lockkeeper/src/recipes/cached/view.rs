//! Reads and writes the records of a key. Each statement about time is a record with a ttl, so the store's
//! clock decides: as long as the record exists, the statement is true.

use std::time::Duration;

use lockkeeper_core::{Error, Expect, Fence, LockName, Result, Version, WriteOutcome};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::record::{CachedRecord, FailureMark, FreshMark, StoredValue};
use super::{Cached, CachedValue, ValueState, early};
use crate::keeper::Lockkeeper;
use crate::recipes::cas_record::{CasRecord, Retry, Snapshot, Tries};
use crate::recipes::chunks::Chunks;
use crate::recipes::{format, name_of};

/// The records of one key.
#[derive(Clone, Debug)]
pub(super) struct CachedRecords {
    pub value: CasRecord,
    fresh: LockName,
    failed: LockName,
    key: String,
}

/// The state of the records at one moment.
#[derive(Clone, Debug)]
pub(super) struct CachedView {
    /// The record as it was read, for the write that replaces it.
    pub snapshot: Option<Snapshot>,
    pub record: Option<CachedRecord>,
    body: Vec<u8>,
    fresh: Option<FreshMark>,
}

impl CachedView {
    pub fn fence(&self) -> Option<Fence> {
        self.record.as_ref().map(|record| record.fence)
    }

    pub fn stored(&self) -> Option<&StoredValue> {
        self.record.as_ref().and_then(|record| record.value.as_ref())
    }

    /// Whether there is a value whose life is not over. The mark of another value says nothing.
    pub fn is_fresh(&self) -> bool {
        self.stored().is_some() && self.fresh.as_ref().map(|mark| mark.fence) == self.fence()
    }

    /// Whether this caller is to refresh the value although it is fresh.
    pub fn is_early(&self, cached: &Cached) -> bool {
        let now_ms = wall_ms(&cached.keeper);
        self.stored().is_some_and(|value| early::is_early(value, now_ms, cached.beta, early::random_unit()))
    }
}

pub(super) fn wall_ms(keeper: &Lockkeeper) -> u64 {
    keeper.0.clock.wall().as_micros() / 1000
}

impl CachedRecords {
    pub fn new(cached: &Cached, name: LockName) -> Result<CachedRecords> {
        Ok(CachedRecords {
            value: CasRecord::new(&cached.keeper, name),
            fresh: name_of("cached-fresh/", &cached.key)?,
            failed: name_of("cached-failed/", &cached.key)?,
            key: cached.key.clone(),
        })
    }

    /// Reads the value and the mark together: two reads that leave at once.
    pub async fn look(&self) -> Result<CachedView> {
        let (snapshot, fresh) =
            futures_util::future::try_join(self.value.read(), self.read_mark(&self.fresh)).await?;
        let (record, body) = match &snapshot {
            Some(snapshot) => {
                let (record, body) = CachedRecord::parse(&self.key, &snapshot.value)?;
                (Some(record), body.to_vec())
            }
            None => (None, Vec::new()),
        };
        Ok(CachedView { snapshot, record, body, fresh: fresh.map(|(mark, _)| mark) })
    }

    /// The last failure, if its back-off is not over and no value was stored after it.
    pub async fn failure(&self, view: &CachedView) -> Result<Option<FailureMark>> {
        let found = self.read_mark::<FailureMark>(&self.failed).await?;
        Ok(found.map(|(mark, _)| mark).filter(|mark| view.fence().is_none_or(|fence| mark.fence >= fence)))
    }

    /// The value that the record refers to. `None`: there is none, or it is damaged or was evicted, and has
    /// to be computed again.
    ///
    /// A cache of the user's has one value per key, and gets the new one before the record refers to it. A
    /// refresher that dies between the two has replaced the old value, so a newer value counts as well.
    pub async fn load(
        &self,
        cached: &Cached,
        view: &CachedView,
        state: ValueState,
    ) -> Result<Option<CachedValue<Vec<u8>>>> {
        let Some(CachedRecord { fence, value: Some(stored) }) = &view.record else { return Ok(None) };
        let (bytes, fence) = if stored.external {
            let Some(cache) = &cached.cache else { return Err(self.elsewhere()) };
            match cache.get(&self.key).await? {
                Some(found) if found.fence >= *fence => (found.bytes, found.fence),
                _ => return Ok(None),
            }
        } else {
            (self.chunks(*fence).read(stored.parts, &view.body).await?, *fence)
        };
        // The record has the size of its own value only.
        if view.fence() == Some(fence) && bytes.len() != stored.size {
            tracing::debug!(key = self.key, "a part of a cached value is missing; it is computed again");
            return Ok(None);
        }
        let value = CachedValue { value: bytes, fence, state, refresh_error: None, not_stored: None };
        Ok(Some(value))
    }

    fn elsewhere(&self) -> Error {
        Error::invalid(format!(
            "the value of {:?} is in a cache that this caller does not name: call in_cache() as the caller that stored it",
            self.key
        ))
    }

    pub fn chunks(&self, fence: Fence) -> Chunks<'_> {
        Chunks { cas_record: &self.value, prefix: "cached-part", key: &self.key, fence }
    }

    /// Says that the value with this fence is fresh for `life`, unless a newer one was stored.
    pub async fn mark_fresh(&self, fence: Fence, life: Duration) -> Result<()> {
        self.write_mark(&self.fresh, &FreshMark { fence }, |found: &FreshMark| found.fence > fence, life)
            .await
    }

    /// Says that a refresh has failed, unless a newer one has.
    pub async fn mark_failed(&self, mark: &FailureMark, back_off: Duration) -> Result<()> {
        self.write_mark(&self.failed, mark, |found: &FailureMark| found.fence > mark.fence, back_off).await
    }

    async fn read_mark<M: DeserializeOwned>(&self, name: &LockName) -> Result<Option<(M, Version)>> {
        let Some(record) = self.value.keeper.0.store.read(name).await? else { return Ok(None) };
        Ok(Some((format::decode(name.as_str(), &record.value)?, record.version)))
    }

    /// Writes a mark over an older one. A try whose outcome is unknown is repeated: the mark is the same.
    async fn write_mark<M: Serialize + DeserializeOwned>(
        &self,
        name: &LockName,
        mark: &M,
        is_newer: impl Fn(&M) -> bool,
        ttl: Duration,
    ) -> Result<()> {
        let store = &self.value.keeper.0.store;
        let mut tries = Tries::new(&self.value.keeper, Retry::Briefly);
        loop {
            let found = self.read_mark::<M>(name).await?;
            if found.as_ref().is_some_and(|(found, _)| is_newer(found)) {
                return Ok(());
            }
            let expect = found.map_or(Expect::Absent, |(_, version)| Expect::Version(version));
            match store.write(name, &format::encode(mark), expect, Some(ttl)).await {
                Ok(WriteOutcome::Written(_)) => return Ok(()),
                // Another caller wrote in between: compare again.
                Ok(WriteOutcome::Conflict(_)) => {}
                Err(error) => tries.after(error).await?,
            }
        }
    }
}
