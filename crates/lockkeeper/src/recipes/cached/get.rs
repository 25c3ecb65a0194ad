//! [`Cached::get`]: returns the value, or computes it under the lock of the key.

use std::fmt;
use std::future::Future;

use lockkeeper_core::{Error, Fence, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::view::CachedRecords;
use super::{Cached, CachedStart, CachedValue, FailedRefresh, RefreshPermit, ValueState};
use crate::recipes::once::nested;

/// Why there is no value.
#[derive(Debug)]
pub enum CachedError<E> {
    /// The store or the lock failed, or the call was wrong.
    Store(Error),
    /// This caller computed, and its work failed with this error.
    Work(E),
    /// Another caller's work failed a short time ago.
    Failed(FailedRefresh),
}

impl<E> From<Error> for CachedError<E> {
    fn from(error: Error) -> Self {
        CachedError::Store(error)
    }
}

impl<E: fmt::Display> fmt::Display for CachedError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CachedError::Store(error) => error.fmt(f),
            CachedError::Work(error) => write!(f, "the value could not be computed: {error}"),
            CachedError::Failed(failed) => {
                write!(
                    f,
                    "another caller could not compute the value (fence {}): {}",
                    failed.fence, failed.error
                )
            }
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for CachedError<E> {}

impl Cached {
    /// Returns the value, or runs `work` and stores what it returns as JSON. `work` is called only if this
    /// caller has the permit, and dropped before the deadline if the lease cannot be renewed: then the next
    /// caller takes over, and this one gets the old value, or [`Error::Lost`].
    ///
    /// A failed `work` leaves the old value as it is: this caller and the next ones get it, with the error
    /// in [`CachedValue::refresh_error`]. If there is none, this caller gets [`CachedError::Work`], and the
    /// others wait for the next try, or get [`CachedError::Failed`] with [`Cached::negative`].
    ///
    /// A computed value that cannot be stored is returned all the same, with the reason in
    /// [`CachedValue::not_stored`]. Dropping the future gives the permit back; so does a panic.
    pub async fn get<T, E, W>(self, work: impl FnOnce(Fence) -> W) -> Result<CachedValue<T>, CachedError<E>>
    where
        T: Serialize + DeserializeOwned,
        E: fmt::Display,
        W: Future<Output = Result<T, E>>,
    {
        let mut computed = None;
        let found = self
            .get_bytes(|fence| {
                let (work, computed) = (work(fence), &mut computed);
                async move {
                    let value = work.await.map_err(JsonFailure::Work)?;
                    let bytes = serde_json::to_vec(&value).map_err(|e| JsonFailure::Json(e.to_string()))?;
                    *computed = Some(value);
                    Ok(bytes)
                }
            })
            .await;
        let found = found.map_err(|error| match error {
            CachedError::Store(error) => CachedError::Store(error),
            CachedError::Failed(failed) => CachedError::Failed(failed),
            CachedError::Work(JsonFailure::Work(error)) => CachedError::Work(error),
            CachedError::Work(JsonFailure::Json(why)) => {
                CachedError::Store(Error::invalid(format!("the value cannot be written as JSON: {why}")))
            }
        })?;
        let value = match (found.state, computed) {
            (ValueState::Computed, Some(value)) => value,
            _ => serde_json::from_slice(&found.value)
                .map_err(|e| Error::invalid(format!("the cached value is not of this type: {e}")))?,
        };
        let CachedValue { fence, state, refresh_error, not_stored, .. } = found;
        Ok(CachedValue { value, fence, state, refresh_error, not_stored })
    }

    /// The same for bytes, which are stored as they are.
    pub async fn get_bytes<E, W>(
        self,
        work: impl FnOnce(Fence) -> W,
    ) -> Result<CachedValue<Vec<u8>>, CachedError<E>>
    where
        E: fmt::Display,
        W: Future<Output = Result<Vec<u8>, E>>,
    {
        let cached = self.clone();
        let permit = match self.claim().await? {
            CachedStart::Value(found) => return Ok(found),
            CachedStart::Failed(failed) => return Err(CachedError::Failed(failed)),
            CachedStart::Refresh(permit) => permit,
        };
        let fence = permit.fence();
        match permit.guard().run(nested::scope(permit.cas_record(), work(fence))).await {
            Ok(Ok(value)) => Ok(cached.keep(*permit, value).await),
            Ok(Err(error)) => match permit.fail(&error.to_string()).await {
                Ok(Some(old)) => Ok(old),
                // The error of the work says more than that of the store.
                _ => Err(CachedError::Work(error)),
            },
            Err(lost) => {
                drop(permit);
                match cached.current().await {
                    Ok(Some(found)) => Ok(CachedValue { refresh_error: Some(lost.to_string()), ..found }),
                    _ => Err(lost.into()),
                }
            }
        }
    }

    /// Stores a computed value, and returns it; or the newer one of another caller.
    async fn keep(self, permit: RefreshPermit, value: Vec<u8>) -> CachedValue<Vec<u8>> {
        let fence = permit.fence();
        let kept = permit.finish(&value).await;
        if let Err(Error::Stale { .. }) = kept
            && let Ok(Some(newer)) = self.current().await
        {
            return newer;
        }
        let not_stored = kept.err().map(|error| error.to_string());
        CachedValue { value, fence, state: ValueState::Computed, refresh_error: None, not_stored }
    }

    /// The value as it is now, if this caller may use it. Neither waits nor computes.
    pub async fn current(&self) -> Result<Option<CachedValue<Vec<u8>>>> {
        let records: CachedRecords = self.check()?;
        self.usable(&records, &records.look().await?).await
    }
}

/// Why there is no JSON of a value.
#[derive(Debug)]
enum JsonFailure<E> {
    Work(E),
    Json(String),
}

impl<E: fmt::Display> fmt::Display for JsonFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JsonFailure::Work(error) => error.fmt(f),
            JsonFailure::Json(why) => write!(f, "the value cannot be written as JSON: {why}"),
        }
    }
}
