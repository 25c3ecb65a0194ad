use std::future::Future;

use lockkeeper_core::{Error, Fence, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Claim, Done, Once, Stored};

impl Once {
    /// The result, from now or from before. `work` is called only if it is our turn, and dropped before the deadline if
    /// the lease cannot be kept: then the answer is [`Error::Lost`] and the next caller takes over. [`Error::Stale`] if
    /// somebody took over while we finished: our result was not kept, and theirs counts.
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
        let result = turn.guard().run(work(fence)).await?;
        turn.finish(to_stored(&result)?).await?;
        Ok(Done { result, fence, replayed: false })
    }
}

fn to_stored<T: Serialize, E: Serialize>(result: &Result<T, E>) -> Result<Stored> {
    let bytes = match result {
        Ok(value) => serde_json::to_vec(value),
        Err(value) => serde_json::to_vec(value),
    };
    let bytes = bytes.map_err(|e| Error::invalid(format!("the result cannot be written as JSON: {e}")))?;
    Ok(Stored { ok: result.is_ok(), bytes })
}

fn of_stored<T: DeserializeOwned, E: DeserializeOwned>(stored: Stored) -> Result<Result<T, E>> {
    let result = match stored.ok {
        true => serde_json::from_slice(&stored.bytes).map(Ok),
        false => serde_json::from_slice(&stored.bytes).map(Err),
    };
    result.map_err(|e| Error::invalid(format!("the stored result is not of this type: {e}")))
}
