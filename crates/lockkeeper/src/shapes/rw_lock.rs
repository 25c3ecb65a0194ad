//! A lock that many readers share, or one writer holds alone.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use lockkeeper_core::{Error, Owner, ReleaseOutcome, Result};

use super::{HoldOptions, hold_options, hold_owner, need};
use crate::builder::LockBuilder;
use crate::guard::Guard;
use crate::keeper::Lockkeeper;

/// A read-write lock by name. Nothing happens before [`RwLock::read`] or [`RwLock::write`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let catalogue = keeper.rw_lock("catalogue");
/// let writer = catalogue.write().await?;                  // alone
/// let fence = writer.fence();                             // travels with every write
/// let reader = writer.downgrade().await?;                 // no other writer in between
/// assert!(catalogue.try_write().await?.is_none());
/// assert!(catalogue.try_read().await?.is_some());
/// # assert_eq!(reader.fence(), fence);
/// reader.release().await?;
/// # Ok(())
/// # }
/// ```
///
/// Requests wait in one queue, so a writer that waits is not starved: readers that come after it wait
/// behind it. On a store without a queue waiters poll with a back-off, in no order.
#[must_use = "nothing happens before read() or write()"]
#[derive(Clone, Debug)]
pub struct RwLock {
    keeper: Lockkeeper,
    name: String,
    options: HoldOptions,
}

/// A shared hold. Dropping it releases it, as with a [`Guard`].
#[must_use = "a guard that is dropped releases its lock"]
#[derive(Debug)]
pub struct ReadGuard(Guard);

/// An exclusive hold. Dropping it releases it, as with a [`Guard`].
#[must_use = "a guard that is dropped releases its lock"]
#[derive(Debug)]
pub struct WriteGuard {
    guard: Guard,
    lock: RwLock,
    owner: Option<Owner>,
}

/// A write lock that could not become a read lock, and the reason. The caller holds the write lock still, if
/// [`Guard::is_held`] says so.
#[derive(Debug)]
pub struct DowngradeError {
    /// The write lock.
    pub lock: WriteGuard,
    /// The reason.
    pub error: Error,
}

impl fmt::Display for DowngradeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the write lock could not become a read lock: {}", self.error)
    }
}

impl std::error::Error for DowngradeError {}

impl Lockkeeper {
    /// The read-write lock called `name`. The first call reports an invalid name.
    ///
    /// It is the lock of that name: [`Lockkeeper::lock`] and `lockkeeper run NAME` exclude its readers and
    /// writers, and `lockkeeper run NAME --shared` is one of its readers.
    pub fn rw_lock(&self, name: impl Into<String>) -> RwLock {
        RwLock { keeper: self.clone(), name: name.into(), options: HoldOptions::default() }
    }
}

impl RwLock {
    hold_options!();

    /// Waits for a shared hold.
    pub async fn read(&self) -> Result<ReadGuard> {
        let request = self.waiting(self.request(None)?.shared());
        request.acquire().await.map(ReadGuard)
    }

    /// A shared hold, if there is neither a writer nor one that waits.
    pub async fn try_read(&self) -> Result<Option<ReadGuard>> {
        Ok(self.request(None)?.shared().try_acquire().await?.map(ReadGuard))
    }

    /// Waits for an exclusive hold.
    pub async fn write(&self) -> Result<WriteGuard> {
        let owner = hold_owner(&self.keeper);
        let guard = self.waiting(self.request(owner)?).acquire().await?;
        Ok(WriteGuard { guard, lock: self.clone(), owner })
    }

    /// An exclusive hold, if the lock is free.
    pub async fn try_write(&self) -> Result<Option<WriteGuard>> {
        let owner = hold_owner(&self.keeper);
        let guard = self.request(owner)?.try_acquire().await?;
        Ok(guard.map(|guard| WriteGuard { guard, lock: self.clone(), owner }))
    }

    fn request(&self, owner: Option<Owner>) -> Result<LockBuilder> {
        need(&self.keeper, self.keeper.profile().shared, "a read-write lock", "shared locks")?;
        Ok(self.options.apply(self.keeper.lock(&self.name), owner))
    }

    fn waiting(&self, request: LockBuilder) -> LockBuilder {
        match self.options.wait {
            Some(wait) => request.wait(wait),
            None => request,
        }
    }
}

impl Deref for ReadGuard {
    type Target = Guard;
    fn deref(&self) -> &Guard {
        &self.0
    }
}

impl ReadGuard {
    /// Refused, always: two readers that both wait to become the writer would wait for each other without
    /// end. Release the read lock, take [`RwLock::write`], and read again what you decided on, because
    /// another writer may have been there in between.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with this reason. The read lock stays as it is.
    pub fn upgrade(&self) -> Result<WriteGuard> {
        Err(Error::Unsupported(format!(
            "a read lock on {} cannot become a write lock: two readers that both try would wait for each other without end. \
             Release it, take write(), and read again what you decided on",
            self.0.names()
        )))
    }

    /// Releases the lock: see [`Guard::release`].
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.0.release().await
    }
}

impl Deref for WriteGuard {
    type Target = Guard;
    fn deref(&self) -> &Guard {
        &self.guard
    }
}

impl WriteGuard {
    /// Makes this a read lock without a gap: no other writer holds the lock in between. Readers are admitted
    /// from now on, unless a writer waits: then they wait behind it. The fence stays the same.
    ///
    /// The holder enters its own lock again as a reader, and releases the write lock then. If the store does
    /// not answer the release, readers wait until the lease of the write lock is over.
    ///
    /// # Errors
    /// The write lock, still held, with [`Error::Unsupported`] on a store without re-entry, [`Error::Lost`]
    /// if the lock was lost, or the error of the store.
    pub async fn downgrade(self) -> Result<ReadGuard, Box<DowngradeError>> {
        match self.enter_shared().await {
            Ok(shared) => {
                // A release that fails is repeated in the background.
                let _ = self.guard.release().await;
                Ok(ReadGuard(shared))
            }
            Err(error) => Err(Box::new(DowngradeError { lock: self, error })),
        }
    }

    async fn enter_shared(&self) -> Result<Guard> {
        let keeper = &self.lock.keeper;
        need(keeper, self.owner.is_some(), "a downgrade", "re-entry by an owner, to keep other writers out")?;
        let request = self.lock.request(self.owner)?.shared().try_acquire();
        match self.guard.run(request).await?? {
            // Another fence is another grant: the write lock was lost before it.
            Some(shared) if shared.fence() == self.guard.fence() => Ok(shared),
            Some(_) | None => Err(Error::Lost(format!("the write lock on {} was lost", self.guard.names()))),
        }
    }

    /// Releases the lock: see [`Guard::release`].
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.guard.release().await
    }
}
