use lockkeeper_core::{Error, Fence, Release, Result};

use super::page::{self, Page};
use crate::guard::Guard;
use crate::recipes::backoff::Backoff;
use crate::recipes::cell::{Cell, Retry};

/// A term of office, for as long as its guard is held. Dropping it ends it; nothing is proclaimed then.
#[must_use = "a leader that is dropped leads no more"]
#[derive(Debug)]
pub struct Leader {
    pub(super) cell: Cell,
    pub(super) name: String,
    pub(super) guard: Guard,
}

impl Leader {
    /// The number to send along with everything that is done as the leader.
    pub fn term(&self) -> Fence {
        self.guard.fence()
    }

    /// The lock of the term: whether it is held, until when, and what to do before it is lost.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Says something to all who observe: at most 8 KiB. [`Error::Lost`] if the term is over, [`Error::Stale`] if a newer
    /// leader has spoken, which a leader that was paused or broken may learn here first.
    pub async fn proclaim(&self, value: impl Into<String>) -> Result<()> {
        let value = value.into();
        page::check(&value)?;
        self.guard.run(self.say(Some(value), false)).await?
    }

    /// The first word of a term. One that is resumed, and says the same as before, has said it already.
    pub(super) async fn begin(&self, value: String) -> Result<()> {
        self.guard.run(self.say(Some(value), true)).await?
    }

    /// Proclaims that it resigns, and gives the lock back. The next in line is elected at once.
    ///
    /// [`Release::AlreadyGone`]: the term had been lost before.
    pub async fn resign(self) -> Result<Release> {
        if self.guard.is_held() {
            // Those who observe learn of the next leader in any case: no reason to stay.
            if let Ok(Err(error)) | Err(error) = self.guard.run(self.say(None, false)).await {
                tracing::debug!(%error, "the resignation was not proclaimed");
            }
        }
        self.guard.release().await
    }

    async fn say(&self, value: Option<String>, unless_said: bool) -> Result<()> {
        let clock = &*self.cell.keeper.0.clock;
        let mut backoff = Backoff::new(clock);
        loop {
            let old = self.cell.read().await?;
            let mut page = match &old {
                Some(seen) => Page::parse(&self.name, &seen.value)?,
                None => Page::default(),
            };
            if unless_said && page.newest().is_some_and(|p| p.term == self.term() && p.value == value) {
                return Ok(());
            }
            page.say(self.term(), value.clone())?;
            match self.cell.swap(old.as_ref(), &page.bytes(), None, Retry::Briefly).await? {
                Ok(_) => return Ok(()),
                // Only a leader before us can have been quicker; it is refused from our first word on.
                Err(_) => backoff.wait().await,
            }
        }
    }

    /// Ends when the term is lost, with the reason.
    pub async fn lost(&self) -> Error {
        self.guard.lost().await
    }
}
