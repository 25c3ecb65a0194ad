//! Keeps a lease that is no lock's from ending while its holder works.

use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Result};
use lockkeeper_host::{Clock, sleep_until};

use super::backoff::random_part;

/// A lease that its holder extends itself.
pub(crate) trait ExtendableLease {
    /// Until when the lease is valid.
    fn deadline(&self) -> impl Future<Output = BootInstant> + Send;
    /// Lets the lease count anew. [`Error::Lost`] if it is over.
    fn extend(&self) -> impl Future<Output = Result<()>> + Send;
}

/// Does `work` and extends the lease meanwhile. If the lease is lost, drops `work` before another process can have it.
pub(crate) async fn run_extended<F: Future>(
    lease: &impl ExtendableLease,
    clock: &dyn Clock,
    length: Duration,
    work: F,
) -> Result<F::Output> {
    tokio::select! {
        biased;
        lost = keep_extended(lease, clock, length) => Err(lost),
        done = work => Ok(done),
    }
}

/// Extends the lease for as long as that works.
async fn keep_extended(lease: &impl ExtendableLease, clock: &dyn Clock, length: Duration) -> Error {
    let every = length / 3;
    loop {
        let (now, deadline) = (clock.now(), lease.deadline().await);
        if now >= deadline {
            return Error::Lost("the lease is over: it could not be extended in time".into());
        }
        let next = now + (every * 3 / 4 + random_part(every / 4));
        sleep_until(clock, next.min(deadline)).await;
        // A server that hangs must not delay the loss.
        let extended = tokio::select! {
            biased;
            () = sleep_until(clock, deadline) => continue,
            extended = lease.extend() => extended,
        };
        match extended {
            Ok(()) => {}
            Err(error @ Error::Lost(_)) => return error,
            Err(error @ Error::Stale { .. }) => return Error::Lost(error.to_string()),
            Err(error) => {
                tracing::debug!(%error, "a lease could not be extended; trying again");
                sleep_until(clock, (clock.now() + every / 8).min(deadline)).await;
            }
        }
    }
}
