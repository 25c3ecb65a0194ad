use std::future::Future;

use lockkeeper_core::{Error, Fence, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Claim, Done, Once, Stored, nested};

impl Once {
    /// The result, from now or from before. `work` is called only if it is our turn, and dropped before the deadline if
    /// the lease cannot be kept: then the answer is [`Error::Lost`] and the next caller takes over. [`Error::Stale`] if
    /// somebody took over while we finished: our result was not kept, and theirs counts.
    ///
    /// A result that JSON cannot give back (a NaN, a map whose keys are no text), or that is too large, is [`Error::Unknown`] for
    /// every caller: the work was done, and is not done again under this key. [`Error::Deadlock`] if `work` itself asks for
    /// its own key, in the same task.
    ///
    /// Dropping the future gives the turn back; so does a panic. The next caller runs then, with a newer fence.
    pub async fn run<T, E, W>(self, work: impl FnOnce(Fence) -> W) -> Result<Done<Result<T, E>>>
    where
        T: Serialize + DeserializeOwned,
        E: Serialize + DeserializeOwned,
        W: Future<Output = Result<T, E>>,
    {
        let turn = match self.claim().await? {
            Claim::Done(Done { result, fence, .. }) => {
                return Ok(Done { result: of_stored(result)?, fence, replayed: true });
            }
            Claim::Turn(turn) => turn,
        };
        let fence = turn.fence();
        let result = turn.guard().run(nested::scope(turn.cell(), work(fence))).await?;
        match to_stored(&result) {
            Ok(stored) => turn.finish(stored).await?,
            Err(why) => turn.finish_unkept(result.is_ok(), &why).await?,
        }
        Ok(Done { result, fence, replayed: false })
    }
}

/// The result as bytes that give it back; or why there are none.
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
    // JSON has no NaN, and writes null instead: what cannot be read again is no result.
    match of_stored::<T, E>(stored.clone()) {
        Ok(_) => Ok(stored),
        Err(error) => Err(format!("JSON does not give it back: {error}")),
    }
}

fn of_stored<T: DeserializeOwned, E: DeserializeOwned>(stored: Stored) -> Result<Result<T, E>> {
    let result = match stored.ok {
        true => serde_json::from_slice(&stored.bytes).map(Ok),
        false => serde_json::from_slice(&stored.bytes).map(Err),
    };
    result.map_err(|e| Error::invalid(format!("the stored result is not of this type: {e}")))
}
