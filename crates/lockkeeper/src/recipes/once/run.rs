//! [`Once::run`]: claims the key, runs the work under its lock, and stores the result as JSON.

use std::future::Future;

use lockkeeper_core::{Error, Fence, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Done, Once, OnceStart, Stored, nested};

impl Once {
    /// Returns the stored result, or runs `work` and stores its result. `work` is called only if this
    /// caller has the permit, and dropped before the deadline if the lease cannot be renewed: then the
    /// answer is [`Error::Lost`] and the next caller takes over. [`Error::Stale`] if another caller took
    /// over during the write: its result counts, and this one is not stored.
    ///
    /// A result that JSON cannot represent (a NaN, a map whose keys are not text), or that is too large, is
    /// [`Error::Unknown`] for every caller: the work was done, and is not done again under this key.
    /// [`Error::Deadlock`] if `work` requests its own key in the same task.
    ///
    /// Dropping the future gives the permit back; so does a panic. The next caller then runs with a newer
    /// fence.
    pub async fn run<T, E, W>(self, work: impl FnOnce(Fence) -> W) -> Result<Done<Result<T, E>>>
    where
        T: Serialize + DeserializeOwned,
        E: Serialize + DeserializeOwned,
        W: Future<Output = Result<T, E>>,
    {
        let permit = match self.claim().await? {
            OnceStart::Done(Done { result, fence, .. }) => {
                return Ok(Done { result: of_stored(result)?, fence, replayed: true });
            }
            OnceStart::Run(permit) => permit,
        };
        let fence = permit.fence();
        let result = permit.guard().run(nested::scope(permit.cas_record(), work(fence))).await?;
        match to_stored(&result) {
            Ok(stored) => permit.finish(stored).await?,
            Err(why) => permit.finish_without_result(result.is_ok(), &why).await?,
        }
        Ok(Done { result, fence, replayed: false })
    }
}

/// The result as bytes from which it can be read again; or why there are none.
fn to_stored<T, E>(result: &Result<T, E>) -> Result<Stored, String>
where
    T: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned,
{
    let bytes = match result {
        Ok(value) => serde_json::to_vec(value),
        Err(value) => serde_json::to_vec(value),
    };
    let bytes = bytes.map_err(|e| format!("it cannot be written as JSON: {e}"))?;
    let stored = Stored { ok: result.is_ok(), bytes };
    // JSON has no NaN and writes null instead, so check that the bytes can be read.
    match of_stored::<T, E>(stored.clone()) {
        Ok(_) => Ok(stored),
        Err(error) => Err(format!("it cannot be read again from JSON: {error}")),
    }
}

fn of_stored<T: DeserializeOwned, E: DeserializeOwned>(stored: Stored) -> Result<Result<T, E>> {
    let result = match stored.ok {
        true => serde_json::from_slice(&stored.bytes).map(Ok),
        false => serde_json::from_slice(&stored.bytes).map(Err),
    };
    result.map_err(|e| Error::invalid(format!("the stored result is not of this type: {e}")))
}
