use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};

use super::page::Page;
use super::{OnFailure, Stored, parts};
use crate::guard::Guard;
use crate::recipes::backoff::Backoff;
use crate::recipes::cell::{Cell, Seen};

/// The page of a run that nobody finished stays for this long, or for as long as results are kept if that is longer. It
/// only keeps a crashed key from staying for ever, and no run takes that long.
pub(super) fn forgotten_after(keep: Duration) -> Duration {
    keep.max(Duration::from_secs(30 * 24 * 60 * 60))
}

/// The right to do it, with a fence. Dropping it gives the turn back: the next caller runs.
#[must_use = "a turn that is dropped is given back"]
#[derive(Debug)]
pub struct Turn {
    pub(super) cell: Cell,
    pub(super) guard: Guard,
    /// The page that says that we run.
    pub(super) running: Seen,
    pub(super) key: String,
    pub(super) print: Option<String>,
    pub(super) keep: Duration,
    pub(super) on_failure: OnFailure,
}

impl Turn {
    /// The number to send along with every write.
    pub fn fence(&self) -> Fence {
        self.guard.fence()
    }

    /// The lock under which it is done: to know when it is lost.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Keeps the result, or forgets the try if it failed and is to be retried. Then gives the lock back.
    ///
    /// The record decides, not the lease: a result that comes late counts if nobody took over meanwhile. If somebody did,
    /// it is [`Error::Stale`]. A store that is away is tried again for as long as nobody can take over, a ttl at most.
    pub async fn finish(self, result: Stored) -> Result<()> {
        let clock = self.cell.keeper.0.clock.clone();
        let (give_up, mut backoff) = (clock.now() + self.guard.ttl(), Backoff::new(&*clock));
        let stored = loop {
            match self.try_finish(&result).await {
                // The work is done. To give up because of a moment would mean to do it again.
                Err(Error::Unavailable(_)) if self.guard.is_held() && clock.now() < give_up => {
                    backoff.wait().await
                }
                stored => break stored,
            }
        };
        // If it is lost by now, or cannot be given back: its ttl ends it, and everybody finds the result.
        let _ = self.guard.release().await;
        stored
    }

    async fn try_finish(&self, result: &Stored) -> Result<()> {
        match self.on_failure {
            OnFailure::Retry if !result.ok => self.forget().await,
            _ => self.store(result).await,
        }
    }

    async fn store(&self, result: &Stored) -> Result<()> {
        let (fence, keep) = (self.fence(), self.keep);
        // The parts outlive the page, so that whoever has read the page finds them.
        let longer = keep + Duration::from_secs(60);
        let (done, body) =
            parts::scatter(&self.cell, &self.key, fence, result.ok, &result.bytes, longer).await?;
        let parts = done.parts;
        let page = Page { fence, print: self.print.clone(), done: Some(done) };
        let stored = self.cell.swap(Some(&self.running), &page.bytes(body), Some(keep)).await;
        match stored {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(found)) => {
                parts::sweep(&self.cell, &self.key, fence, parts).await;
                Err(self.refused(found))
            }
            Err(error) => Err(error),
        }
    }

    async fn forget(&self) -> Result<()> {
        match self.cell.remove(&self.running).await? {
            Ok(()) => Ok(()),
            Err(found) => Err(self.refused(found)),
        }
    }

    fn refused(&self, found: Option<Seen>) -> Error {
        let page = found.and_then(|seen| Page::parse(&self.key, &seen.value).ok().map(|(page, _)| page));
        match page {
            Some(page) => Error::Stale { presented: self.fence(), seen: page.fence },
            None => Error::Lost(format!("the record of {:?} was deleted while it ran", self.key)),
        }
    }
}
