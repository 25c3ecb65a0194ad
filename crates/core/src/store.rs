use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;

use crate::{
    Acquired, Ask, Claim, Delete, Event, Expect, Fence, Grant, LockName, LockPage, LockView, Page, Profile,
    Record, RecordPage, Release, Renewal, Result, Write,
};

/// Events as they happen. It ends only with the store.
pub type EventStream = Pin<Box<dyn Stream<Item = Result<Event>> + Send>>;

/// A store of locks: the small door that every backend has. Conveniences live outside it.
///
/// - *Busy*, *Lost* and *AlreadyGone* are answers, not errors.
/// - [`crate::Error::Unknown`] means that it may have happened; asking again with the same attempt gives the same fence.
/// - Ownership is checked in the store, in the same step that changes it.
#[async_trait]
pub trait Locks: Send + Sync {
    /// What this store keeps and what it does not.
    fn profile(&self) -> Profile;

    /// Asks, and stands in line for as long as the ask says. The same attempt asked again gives the same fence and
    /// counts the lease anew.
    ///
    /// Dropping the future leaves the outcome open: call [`Locks::release`] with the ask's claim to leave the line, or
    /// to give back what was granted meanwhile.
    async fn acquire(&self, ask: &Ask) -> Result<Acquired>;

    /// Renews many grants in one step; one answer for each, in order.
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>>;

    /// Gives back a grant, or leaves the line: whichever of the two the attempt is in.
    async fn release(&self, claim: &Claim) -> Result<Release>;

    /// One lock as it is now. `None`: nobody holds it, waits for it, or is kept from it.
    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>>;

    /// The locks whose names begin with `prefix`, in order, a page at a time.
    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage>;

    /// What happens from now on to locks whose names begin with `prefix`.
    async fn watch(&self, prefix: &str) -> Result<EventStream>;

    /// Asks the holders of a lock to give it back, without letting anybody else in before they have: the next renewal of each returns
    /// [`Renewal::Revoked`] with the reason, and no lease of theirs is counted anew. So the next waiter is let in when the holders have
    /// released the lock, or their leases are over. Returns a fence that is newer than every grant before.
    ///
    /// The same attempt asked again, and re-entry by the same owner, return [`crate::Error::Lost`]. A grant of several names is revoked as a
    /// whole. A minimum hold is not waited for. A lock that is only held back is freed.
    ///
    /// [`crate::Error::Unsupported`], and nothing changed, where [`Profile::revoke`] is false.
    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence>;

    /// Takes a lock away from whoever holds it, and lets the next one in at once: the holder learns of it at its next renewal, and may
    /// write until then. The fence moves on: the one returned is newer than every grant before.
    /// A grant of several names is lost as a whole.
    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence>;
}

/// A store of small versioned values.
#[async_trait]
pub trait Records: Send + Sync {
    /// The record, if there is one.
    async fn read(&self, key: &LockName) -> Result<Option<Record>>;

    /// Writes if the expectation is met. With a ttl, the record is gone that long after the write.
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write>;

    /// Deletes if the expectation is met.
    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete>;

    /// The records whose keys begin with `prefix`, in order, a page at a time.
    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage>;
}

/// Locks and records: enough to build every recipe without knowing the store.
pub trait Store: Locks + Records {}

impl<S: Locks + Records + ?Sized> Store for S {}
