//! The operator's calls for a group: counts, the items that failed for good, and another chance for them.

use lockkeeper_core::{Error, Fence, Result, WallTime};

use super::ClaimGroup;
use super::record::{ItemRecord, ItemState};
use crate::recipes::cas_record::{Retry, Snapshot};
use crate::recipes::need_records;

/// How many items of a group are in which state. Items that no worker has taken have no record, and are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimCounts {
    /// A worker has them.
    pub taken: usize,
    /// They are free, or wait for their next try.
    pub waiting: usize,
    /// They are done, and still recorded.
    pub done: usize,
    /// They have failed for good.
    pub failed: usize,
}

/// An item that has failed for good.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedItem {
    /// Which item it is.
    pub id: String,
    /// How many attempts there were.
    pub attempts: u32,
    /// Why the last one failed.
    pub error: String,
    /// The fence of the write that recorded it.
    pub fence: Fence,
    /// When that was, by the clock of the process that wrote it.
    pub at: WallTime,
    /// Which process wrote it.
    pub by: String,
}

impl ClaimGroup {
    /// How many items are in which state.
    pub async fn counts(&self) -> Result<ClaimCounts> {
        need_records(&self.keeper, "a claim")?;
        let leased = self.leased().await?;
        let mut counts = ClaimCounts::default();
        for (id, _, record) in self.records().await? {
            match record.state {
                ItemState::Done => counts.done += 1,
                ItemState::Failed => counts.failed += 1,
                ItemState::Taken if leased.contains(&id) => counts.taken += 1,
                ItemState::Taken | ItemState::Open => counts.waiting += 1,
            }
        }
        Ok(counts)
    }

    /// The items that have failed for good, in the order of their ids. They stay until [`ClaimGroup::retry`] or
    /// [`ClaimGroup::forget`].
    pub async fn failed(&self) -> Result<Vec<FailedItem>> {
        need_records(&self.keeper, "a claim")?;
        let all = self.records().await?.into_iter();
        let failed = all.filter(|(.., record)| record.state == ItemState::Failed);
        Ok(failed
            .map(|(id, fence, record)| FailedItem {
                id,
                attempts: record.attempts,
                error: record.error.unwrap_or_default(),
                fence,
                at: record.at,
                by: record.by,
            })
            .collect())
    }

    /// Lets an item that has failed for good be tried again, with as many attempts as at first. `false`: it had not
    /// failed for good.
    pub async fn retry(&self, id: &str) -> Result<bool> {
        let Some((snapshot, record)) = self.read_failed(id).await? else { return Ok(false) };
        let now = self.keeper.0.clock.wall();
        let record = ItemRecord { attempts: 0, ..record.next(ItemState::Open, now) };
        let ttl = Some(self.unsettled());
        let swapped =
            self.state_record(id)?.swap(Some(&snapshot), &record.bytes(), ttl, Retry::Briefly).await?;
        Ok(swapped.is_ok())
    }

    /// Forgets an item that has failed for good; a worker whose list has it takes it as a new one. `false`: it had not
    /// failed for good.
    pub async fn forget(&self, id: &str) -> Result<bool> {
        let Some((snapshot, _)) = self.read_failed(id).await? else { return Ok(false) };
        Ok(self.state_record(id)?.remove(&snapshot, Retry::Briefly).await?.is_ok())
    }

    async fn read_failed(&self, id: &str) -> Result<Option<(Snapshot, ItemRecord)>> {
        need_records(&self.keeper, "a claim")?;
        let Some(snapshot) = self.state_record(id)?.read().await? else { return Ok(None) };
        let record = ItemRecord::parse(id, &snapshot)?;
        Ok((record.state == ItemState::Failed).then_some((snapshot, record)))
    }

    /// Every item that has a record, with the fence of its last write.
    async fn records(&self) -> Result<Vec<(String, Fence, ItemRecord)>> {
        let mut all = Vec::new();
        for record in self.scan(&self.names.states).await? {
            let Some(id) = record.key.as_str().strip_prefix(&self.names.states).map(str::to_owned) else {
                return Err(Error::Unavailable("the store returned a record of another name".into()));
            };
            let snapshot = Snapshot::of(record)?;
            if !snapshot.gone {
                let record = ItemRecord::parse(&id, &snapshot)?;
                all.push((id, snapshot.fence, record));
            }
        }
        Ok(all)
    }
}
