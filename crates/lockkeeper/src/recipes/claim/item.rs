//! A claimed item: its fence, its lease, and the three ways in which an attempt ends.

use std::fmt;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Fence, Result};
use tokio::sync::Mutex;

use super::ClaimGroup;
use super::lease::ItemLease;
use super::record::{ItemRecord, ItemState, cut_reason};
use crate::recipes::backoff::growing_pause;
use crate::recipes::cas_record::{CasRecord, Retry, Snapshot};
use crate::recipes::extend::{ExtendableLease, run_extended};

/// The longest that the record of an item stays that is neither done nor failed for good: 30 days, or as long as done
/// items are recorded.
const UNSETTLED: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// An item that this process has claimed.
///
/// Dropping it changes nothing in the store: the item goes to another worker when the lease is over, and the attempt
/// counts. [`ClaimedItem::give_back`] returns it at once.
#[must_use = "an item that is dropped goes to another worker only when its lease is over"]
pub struct ClaimedItem {
    pub(super) group: ClaimGroup,
    pub(super) id: String,
    pub(super) cas_record: CasRecord,
    /// The record of this attempt, which every later attempt changes.
    pub(super) taken: Snapshot,
    pub(super) record: ItemRecord,
    pub(super) lease: Mutex<ItemLease>,
}

/// The consequence of a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// The item is tried again, not before this time is over.
    RetryAfter(Duration),
    /// The limit of attempts is reached: no worker takes the item any more.
    FailedForGood,
}

impl fmt::Debug for ClaimedItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClaimedItem({:?}, fence {}, attempt {})", self.id, self.fence(), self.attempt_number())
    }
}

impl ClaimedItem {
    /// Which item it is.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The fence (the fencing token): higher than that of every earlier attempt of this item. Send it with every write.
    pub fn fence(&self) -> Fence {
        self.taken.fence
    }

    /// How many attempts there have been, with this one.
    pub fn attempt_number(&self) -> u32 {
        self.record.attempts
    }

    /// Until when no other worker can have the item, unless the lease is extended.
    pub async fn deadline(&self) -> BootInstant {
        self.lease.lock().await.deadline
    }

    /// Whether no other worker can have the item now.
    pub async fn is_held(&self) -> bool {
        self.lease.lock().await.is_held()
    }

    /// Lets the lease count anew from now. [`Error::Lost`] if it was over, which stays so.
    pub async fn extend(&self) -> Result<()> {
        self.lease.lock().await.extend().await
    }

    /// Does `work` and extends the lease meanwhile. If the lease is lost, `work` is dropped before another worker can
    /// have the item, and the answer is [`Error::Lost`].
    ///
    /// The renewals are part of this future: a runtime that is blocked for longer than the lease loses the item.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        run_extended(self, &*self.group.keeper.0.clock, self.group.lease, work).await
    }

    /// Records that the item is done. No worker takes it again for as long as done items are [kept](ClaimGroup::keep).
    ///
    /// The record decides, not the lease: a late completion counts if no other worker has taken the item since. If one
    /// has, the answer is [`Error::Stale`] and nothing changes. While the store is unreachable the write is retried
    /// until the lease is over. [`Error::Unknown`] if the store did not record it: the item was done, and may be done
    /// again by the next worker.
    pub async fn complete(self) -> Result<()> {
        let record = self.next(ItemState::Done);
        let keep = self.group.keep;
        self.write(&record, Some(keep)).await.map_err(|error| self.unrecorded_error(error))?;
        self.lease.into_inner().end().await;
        Ok(())
    }

    /// Records that the attempt failed. The item is tried again after the [back-off](ClaimGroup::backoff), or has failed
    /// for good if there were as many attempts as [allowed](ClaimGroup::max_attempts).
    ///
    /// As [`ClaimedItem::complete`]: refused with [`Error::Stale`] if another worker has taken the item since.
    pub async fn fail(self, reason: impl AsRef<str>) -> Result<AfterFailure> {
        let last = self.record.attempts >= self.group.max_attempts;
        let state = if last { ItemState::Failed } else { ItemState::Open };
        let record = ItemRecord { error: Some(cut_reason(reason.as_ref())), ..self.next(state) };
        // An item that has failed for good stays until an operator decides.
        let ttl = (!last).then(|| self.group.unsettled());
        self.write(&record, ttl).await?;
        let (lease, attempts) = (self.lease.into_inner(), self.record.attempts);
        if last {
            lease.end().await;
            return Ok(AfterFailure::FailedForGood);
        }
        let pause = self.group.pause_after(attempts);
        lease.back_off(pause).await;
        Ok(AfterFailure::RetryAfter(pause))
    }

    /// Gives the item back: another worker can take it at once, and this attempt does not count.
    pub async fn give_back(self) -> Result<()> {
        let record = ItemRecord { attempts: self.record.attempts - 1, ..self.next(ItemState::Open) };
        let ttl = self.group.unsettled();
        self.write(&record, Some(ttl)).await?;
        self.lease.into_inner().free().await;
        Ok(())
    }

    fn next(&self, state: ItemState) -> ItemRecord {
        self.record.next(state, self.group.keeper.0.clock.wall())
    }

    /// The error of a worker whose item is done, and whose record does not say so. The store's own error may say that
    /// nothing was done, which is true for the write only.
    fn unrecorded_error(&self, error: Error) -> Error {
        match error {
            Error::Stale { .. } | Error::Lost(_) => error,
            error => Error::Unknown(format!(
                "the item {:?} was done with fence {}, and that is not recorded: {error}",
                self.id,
                self.fence()
            )),
        }
    }

    async fn write(&self, record: &ItemRecord, ttl: Option<Duration>) -> Result<()> {
        let retry = Retry::Until(self.deadline().await);
        match self.cas_record.swap(Some(&self.taken), &record.bytes(), ttl, retry).await? {
            Ok(_) => Ok(()),
            Err(Some(found)) => Err(Error::Stale { presented: self.fence(), seen: found.fence }),
            Err(None) => Err(Error::Lost(format!("the record of the item {:?} was deleted", self.id))),
        }
    }
}

impl ExtendableLease for ClaimedItem {
    async fn deadline(&self) -> BootInstant {
        ClaimedItem::deadline(self).await
    }

    async fn extend(&self) -> Result<()> {
        ClaimedItem::extend(self).await
    }
}

impl ClaimGroup {
    /// How long the record of an item stays that is neither done nor failed for good.
    pub(super) fn unsettled(&self) -> Duration {
        UNSETTLED.max(self.keep)
    }

    /// How long an item waits after so many failed attempts.
    fn pause_after(&self, attempts: u32) -> Duration {
        growing_pause(self.backoff, attempts)
    }
}
