//! The right to do the work of a key: [`RunPermit`] stores the result or gives the permit back.

use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};

use super::record::{OnceRecord, RunOutcome, not_kept_error};
use super::{OnFailure, Stored, result};
use crate::guard::Guard;
use crate::recipes::cas_record::{CasRecord, Retry, Snapshot};

/// How long the record of an unfinished run stays: 30 days, or as long as results are kept if that is
/// longer. It only ends the record of a key whose runner crashed; no run takes that long.
pub(super) fn running_record_ttl(keep: Duration) -> Duration {
    keep.max(Duration::from_secs(30 * 24 * 60 * 60))
}

/// How much longer than the record the chunks of a result stay, beside the ttl for which the write of the record is retried: a caller
/// that has read the record finds them.
const LONGER: Duration = Duration::from_secs(60);

/// Whether the store refuses this result, and may take a record without it.
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Limited(_) | Error::Denied(_) | Error::Invalid(_) | Error::Unsupported(_))
}

/// The right to do the work, with a fence. Dropping it lets the next caller run.
#[must_use = "dropping a permit lets the next caller run"]
#[derive(Debug)]
pub struct RunPermit {
    pub(super) cas_record: CasRecord,
    pub(super) guard: Guard,
    /// The record of this run.
    pub(super) running: Snapshot,
    pub(super) key: String,
    pub(super) print: Option<String>,
    pub(super) keep: Duration,
    pub(super) on_failure: OnFailure,
}

impl RunPermit {
    /// The fence (the fencing token): the number to send with every write.
    pub fn fence(&self) -> Fence {
        self.guard.fence()
    }

    /// The lock of the run, which reports when it is lost.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    pub(crate) fn cas_record(&self) -> &CasRecord {
        &self.cas_record
    }

    /// Stores the result, or removes the record of a failed run that is to be retried. Then releases the
    /// lock.
    ///
    /// The record decides, not the lease: a late result counts if no other caller took over. If one did,
    /// the answer is [`Error::Stale`]. While the store is unreachable the write is retried for as long as
    /// the lease lasts, a ttl at most: giving up would make the next caller do the work again.
    ///
    /// A result that cannot be stored (above 64 MiB, above a limit of the store, or refused by the store) is
    /// [`Error::Unknown`] for this and every later caller: the work was done, and is not done again under this
    /// key. It is [`Error::Unknown`] too if the store did not record the end of the work: the next caller does it
    /// again. The error of a failed run that is to be retried may also be another one; the next caller does it
    /// again in any case.
    pub async fn finish(self, result: Stored) -> Result<()> {
        let stored = match self.on_failure {
            OnFailure::Retry if !result.ok => self.forget().await,
            _ => match self.store(&result).await {
                Err(error) if is_refusal(&error) => {
                    self.store_without_result(result.ok, &error.to_string()).await
                }
                stored => stored.map_err(|error| self.unrecorded_error(error)),
            },
        };
        self.release_lock().await;
        stored
    }

    /// Records that the work was done and that there is no result to store, and why. Then releases the lock.
    ///
    /// The answer is [`Error::Unknown`] for this and every later caller, as for a result that
    /// [cannot be stored](RunPermit::finish); `Ok` for a failed run that is to be retried.
    pub async fn finish_without_result(self, ok: bool, why: &str) -> Result<()> {
        let stored = match self.on_failure {
            OnFailure::Retry if !ok => self.forget().await,
            _ => self.store_without_result(ok, why).await,
        };
        self.release_lock().await;
        stored
    }

    /// Gives the permit back when the lease ends, and not at once as when it is dropped: see [`Guard::let_expire`].
    pub fn let_expire(self) {
        self.guard.let_expire();
    }

    async fn release_lock(self) {
        // If the lock is lost or the release fails, the ttl ends the lock, and every caller finds the
        // result.
        let _ = self.guard.release().await;
    }

    async fn store(&self, result: &Stored) -> Result<()> {
        let (fence, clock) = (self.fence(), &self.cas_record.keeper.0.clock);
        let (began, longer) = (clock.now(), self.guard.ttl().saturating_add(LONGER));
        let (done, body) = self.write_result(result, longer).await?;
        let parts = done.parts;
        let record = OnceRecord { fence, print: self.print.clone(), done: Some(done) };
        let stored = self.write(&record, body).await;
        if matches!(stored, Err(Error::Stale { .. } | Error::Lost(_))) {
            result::delete_result(&self.cas_record, &self.key, fence, parts).await;
        }
        // The writes took so long that the chunks would end before the record.
        if stored.is_ok()
            && parts > 0
            && clock.now().since(began) > longer
            && let Err(error) = self.write_result(result, longer).await
        {
            tracing::warn!(%error, key = self.key, "the end of a stored result comes before the end of its record");
        }
        stored
    }

    async fn write_result<'a>(&self, result: &'a Stored, longer: Duration) -> Result<(RunOutcome, &'a [u8])> {
        let (keep, retry) = (self.keep.saturating_add(longer), Retry::WhileHeld(&self.guard));
        let (fence, bytes) = (self.fence(), &result.bytes);
        result::write_result(&self.cas_record, &self.key, fence, result.ok, bytes, keep, retry).await
    }

    async fn store_without_result(&self, ok: bool, why: &str) -> Result<()> {
        let record = OnceRecord::unkept(self.fence(), self.print.clone(), ok, why);
        Err(match self.write(&record, &[]).await {
            Ok(()) => not_kept_error(&self.key, self.fence(), why),
            Err(error) => self.unrecorded_error(error),
        })
    }

    /// The error of a caller whose work is done, and whose record does not say so. The store's own error may say
    /// that nothing was done, which is true for the write only.
    fn unrecorded_error(&self, error: Error) -> Error {
        let (key, fence) = (&self.key, self.fence());
        match error {
            Error::Stale { .. } | Error::Lost(_) => error,
            Error::Unknown(why) => Error::Unknown(format!(
                "{key:?} was done with fence {fence}, and it is not known whether its result is stored: {why}"
            )),
            error => Error::Unknown(format!(
                "{key:?} was done with fence {fence}, and its result is not stored: {error}. The next caller does it again"
            )),
        }
    }

    async fn write(&self, record: &OnceRecord, body: &[u8]) -> Result<()> {
        let (bytes, retry) = (record.bytes(body), Retry::WhileHeld(&self.guard));
        match self.cas_record.swap(Some(&self.running), &bytes, Some(self.keep), retry).await? {
            Ok(_) => Ok(()),
            Err(found) => Err(self.stale_or_lost(found)),
        }
    }

    async fn forget(&self) -> Result<()> {
        match self.cas_record.remove(&self.running, Retry::WhileHeld(&self.guard)).await? {
            Ok(()) => Ok(()),
            Err(found) => Err(self.stale_or_lost(found)),
        }
    }

    fn stale_or_lost(&self, found: Option<Snapshot>) -> Error {
        let record = found.and_then(|snapshot| {
            OnceRecord::parse(&self.key, &snapshot.value).ok().map(|(record, _)| record)
        });
        match record {
            Some(record) => Error::Stale { presented: self.fence(), seen: record.fence },
            None => Error::Lost(format!("the record of {:?} was deleted while it ran", self.key)),
        }
    }
}
