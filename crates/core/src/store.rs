//! The traits that every store implements: locks, records and rate limits.

use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;

use crate::limit::{LimitOutcome, LimitRequest};
use crate::{
    AcquireOutcome, DeleteOutcome, Event, Examine, Expect, Fence, Grant, LockName, LockPage, LockRequest,
    LockView, Page, Profile, Record, RecordPage, ReleaseOutcome, RenewOutcome, RequestKey, Result,
    WriteOutcome,
};

/// The events of a store. The stream ends only with the store.
pub type EventStream = Pin<Box<dyn Stream<Item = Result<Event>> + Send>>;

/// A store of locks: the small trait that every backend implements. Conveniences live outside it.
///
/// - *Busy*, *Lost* and *AlreadyGone* are answers, not errors.
/// - [`crate::Error::Unknown`] means that the store may have carried the call out; a retry with the same attempt gets the same fence.
/// - *Busy* also answers the earlier requests of the attempt: none of them takes the lock afterwards, so its caller releases nothing.
/// - The store checks ownership in the same step that changes the lock.
#[async_trait]
pub trait Locks: Send + Sync {
    /// The guarantees of this store, and the features that it lacks.
    fn profile(&self) -> Profile;

    /// Requests a lock, and waits in the queue for as long as the request says. The same attempt sent again gets the same fence, and
    /// its lease counts anew.
    ///
    /// Dropping the future leaves the outcome unknown: call [`Locks::release`] with the request's key to leave the queue, or to release
    /// what the store has granted meanwhile. A caller drops its call before it sends the attempt again: if two calls of one attempt overlap, no
    /// store cleans up after the older one once the younger one has its answer.
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome>;

    /// Renews many grants in one step; one answer for each, in order.
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>>;

    /// Releases the grant of an attempt, or removes its queue entry.
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome>;

    /// One lock as it is now. `None`: it has no holder, no waiter and no lock-delay.
    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>>;

    /// The locks whose names begin with `prefix`, in order, a page at a time.
    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage>;

    /// The events, from now on, of locks whose names begin with `prefix`.
    async fn watch(&self, prefix: &str) -> Result<EventStream>;

    /// Asks the holders of a lock to release it, and grants it to no other request before they have: the next renewal of each holder returns
    /// [`RenewOutcome::Revoked`] with the reason, and the store renews no lease of theirs. So the next waiter gets the lock when the holders have
    /// released it, or their leases have ended. Returns a fence that is newer than every grant before.
    ///
    /// The same attempt sent again, and re-entry by the same owner, return [`crate::Error::Lost`]. A grant of several names is revoked as a
    /// whole. A revoke ends a minimum hold, and frees a lock that only a lock-delay keeps.
    ///
    /// [`crate::Error::Unsupported`], and nothing changed, where [`Profile::revoke`] is false.
    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence>;

    /// Takes a lock away from its holders, and grants it to the next waiter at once. A holder learns of it at its next renewal, and may
    /// write until then. Returns a fence that is newer than every grant before.
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
    ) -> Result<WriteOutcome>;

    /// Deletes if the expectation is met.
    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome>;

    /// The records whose keys begin with `prefix`, in order, a page at a time.
    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage>;
}

/// A store of rate limits.
#[async_trait]
pub trait Limits: Send + Sync {
    /// Carries out a request for one or more buckets: all of it or nothing, in one step. A store that has no such step (see
    /// [`Profile::limits`]) takes from one bucket after the other, and gives back if a later one refuses, so that no limit is exceeded.
    ///
    /// Call [`LimitRequest::check`] before anything is sent. [`crate::Error::Unknown`] means that the tokens may have been taken; a retry may take
    /// them a second time, so the caller decides. Dropping the future leaves the outcome unknown.
    ///
    /// [`crate::Error::Unsupported`], and nothing changed, where [`Profile::limits`] is [`crate::LimitSupport::No`].
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome>;
}

/// Locks, records and rate limits: enough to build every recipe without knowing the store. And its examination, for `doctor`.
pub trait Store: Locks + Records + Limits + Examine {}

impl<S: Locks + Records + Limits + Examine + ?Sized> Store for S {}
