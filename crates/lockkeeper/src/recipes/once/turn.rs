use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result};

use super::page::{Page, told_unkept};
use super::{OnFailure, Stored, parts};
use crate::guard::Guard;
use crate::recipes::cell::{Cell, Retry, Seen};

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

    pub(crate) fn cell(&self) -> &Cell {
        &self.cell
    }

    /// Keeps the result, or forgets the try if it failed and is to be retried. Then gives the lock back.
    ///
    /// The record decides, not the lease: a result that comes late counts if no other caller took over meanwhile. If one did,
    /// it is [`Error::Stale`]. While the store is unreachable the write is tried again for as long as the lease lasts, a ttl at
    /// most: giving up would have the next caller do the work again.
    ///
    /// A result that cannot be kept (above 64 MiB, or above a limit of the store's) is [`Error::Unknown`], now and for every
    /// later caller: the work was done, and is not done again under this key.
    pub async fn finish(self, result: Stored) -> Result<()> {
        let stored = match self.on_failure {
            OnFailure::Retry if !result.ok => self.forget().await,
            _ => match self.store(&result).await {
                Err(Error::Limited(why)) => self.store_unkept(result.ok, &why).await,
                stored => stored,
            },
        };
        self.give_back().await;
        stored
    }

    /// Says in the record that the work was done, and that there is no result to be had. Then gives the lock back.
    pub(super) async fn finish_unkept(self, ok: bool, why: &str) -> Result<()> {
        let stored = match self.on_failure {
            OnFailure::Retry if !ok => self.forget().await,
            _ => self.store_unkept(ok, why).await,
        };
        self.give_back().await;
        stored
    }

    async fn give_back(self) {
        // If it is lost by now, or cannot be given back: its ttl ends it, and every caller finds the result.
        let _ = self.guard.release().await;
    }

    async fn store(&self, result: &Stored) -> Result<()> {
        let (fence, retry) = (self.fence(), Retry::WhileHeld(&self.guard));
        // The parts outlive the page, so that a caller that has read the page finds them.
        let longer = self.keep.saturating_add(Duration::from_secs(60));
        let (done, body) =
            parts::scatter(&self.cell, &self.key, fence, result.ok, &result.bytes, longer, retry).await?;
        let parts = done.parts;
        let page = Page { fence, print: self.print.clone(), done: Some(done) };
        let stored = self.write(&page, body).await;
        if matches!(stored, Err(Error::Stale { .. } | Error::Lost(_))) {
            parts::sweep(&self.cell, &self.key, fence, parts).await;
        }
        stored
    }

    async fn store_unkept(&self, ok: bool, why: &str) -> Result<()> {
        let page = Page::unkept(self.fence(), self.print.clone(), ok, why);
        self.write(&page, &[]).await?;
        Err(told_unkept(&self.key, self.fence(), why))
    }

    async fn write(&self, page: &Page, body: &[u8]) -> Result<()> {
        let (bytes, retry) = (page.bytes(body), Retry::WhileHeld(&self.guard));
        match self.cell.swap(Some(&self.running), &bytes, Some(self.keep), retry).await? {
            Ok(_) => Ok(()),
            Err(found) => Err(self.refused(found)),
        }
    }

    async fn forget(&self) -> Result<()> {
        match self.cell.remove(&self.running, Retry::WhileHeld(&self.guard)).await? {
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
