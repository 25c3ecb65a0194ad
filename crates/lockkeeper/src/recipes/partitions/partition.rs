//! An owned partition: the lock of it, and the news that the group wants it back.

use std::fmt;

use lockkeeper_core::{Error, Fence, ReleaseOutcome, Result};
use tokio::sync::{mpsc, watch};

use crate::guard::Guard;

/// A partition that this process owns, for as long as its guard is held. Dropping it gives the partition up.
///
/// The group may assign the partition to another member. [`Partition::revoked`] completes then: finish what is under way, take
/// nothing new, and drop the partition, within the [grace](super::Partitions::grace). After the grace the guard is lost.
///
/// A partition that is given up while the group still assigns it to this member comes back as a new [`Partition`] with a higher fence.
#[must_use = "a partition that is dropped is given up"]
pub struct Partition {
    pub(super) guard: Guard,
    pub(super) number: u32,
    pub(super) count: u32,
    pub(super) draining: watch::Receiver<bool>,
    pub(super) dropped: Dropped,
}

/// The number and the fence of a partition that was dropped.
pub(super) type DroppedPartition = (u32, Fence);

/// Tells the member when the partition is dropped. It stands behind the guard in [`Partition`], so it is dropped after it.
pub(super) struct Dropped {
    pub number: u32,
    pub fence: Fence,
    pub to: mpsc::UnboundedSender<DroppedPartition>,
}

impl Drop for Dropped {
    fn drop(&mut self) {
        // A member that has ended needs no news.
        let _ = self.to.send((self.number, self.fence));
    }
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Partition({} of {}, {:?})", self.number, self.count, self.guard)
    }
}

impl Partition {
    /// Its number: 0 to count - 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The number of partitions of the group.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Its epoch, a fence (a fencing token): the number to send with every write. It grows from owner to owner.
    pub fn fence(&self) -> Fence {
        self.guard.fence()
    }

    /// The lock of the partition: the only truth about whether this process owns it.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Whether this process owns the partition now, as [`Guard::is_held`] says. True while it is being revoked.
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// Whether `key` belongs to this partition.
    pub fn has(&self, key: impl AsRef<[u8]>) -> bool {
        super::partition_of(key, self.count) == self.number
    }

    /// Whether the group wants the partition back, or has lost it: take nothing new.
    pub fn is_revoked(&self) -> bool {
        *self.draining.borrow() || self.draining.has_changed().is_err() || !self.is_held()
    }

    /// Completes when the group wants the partition back, when this member leaves, or when the partition is lost.
    pub async fn revoked(&self) {
        let mut draining = self.draining.clone();
        tokio::select! {
            // Also if the member has ended: no further news would come.
            _ = draining.wait_for(|draining| *draining) => {}
            _ = self.guard.lost() => {}
        }
    }

    /// Completes when the partition is lost, as [`Guard::lost`].
    pub async fn lost(&self) -> Error {
        self.guard.lost().await
    }

    /// Runs `work` for as long as the partition is owned, as [`Guard::run`]: also while it is being revoked, until the grace is over.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.run(work).await
    }

    /// Gives the partition up, and lets its next owner start when the lease ends, not at once as when it is dropped: see
    /// [`Guard::let_expire`].
    pub fn let_expire(self) {
        let Partition { guard, dropped, .. } = self;
        guard.let_expire();
        drop(dropped);
    }

    /// Gives the partition up and returns the store's answer, as [`Guard::release`]. The next owner may start at once.
    pub async fn release(self) -> Result<ReleaseOutcome> {
        let Partition { guard, dropped, .. } = self;
        let answer = guard.release().await;
        drop(dropped);
        answer
    }
}
