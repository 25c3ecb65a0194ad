//! A term of office: [`Leader`] publishes values and resigns.

use lockkeeper_core::{Error, Fence, ReleaseOutcome, Result};

use super::record::{self, ElectionRecord};
use crate::guard::Guard;
use crate::recipes::backoff::JitteredBackoff;
use crate::recipes::cas_record::{CasRecord, Retry};

/// A term of office, for as long as its guard is held. Dropping it ends the term without a proclamation.
#[must_use = "dropping a leader ends its term"]
#[derive(Debug)]
pub struct Leader {
    pub(super) cas_record: CasRecord,
    pub(super) name: String,
    pub(super) guard: Guard,
}

impl Leader {
    /// The term, a fence (a fencing token): the number to send with every write of the leader.
    pub fn term(&self) -> Fence {
        self.guard.fence()
    }

    /// The lock of the term, which reports until when it is held.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Publishes a value of at most 8 KiB to all observers. [`Error::Lost`] if the term is over,
    /// [`Error::Stale`] if a newer leader has published, which a leader that was paused or broken may learn
    /// here first.
    pub async fn proclaim(&self, value: impl Into<String>) -> Result<()> {
        let value = value.into();
        record::check(&value)?;
        self.guard.run(self.publish(Some(value), false)).await?
    }

    /// Publishes the first value of a term, unless a resumed term has published the same value already.
    pub(super) async fn publish_first(&self, value: String) -> Result<()> {
        self.guard.run(self.publish(Some(value), true)).await?
    }

    /// Proclaims the resignation and releases the lock. The next candidate in the queue is elected at once.
    ///
    /// [`ReleaseOutcome::AlreadyGone`]: the term had been lost before.
    pub async fn resign(self) -> Result<ReleaseOutcome> {
        if self.guard.is_held() {
            // Observers learn of the next leader in any case, so a failed proclamation does not stop the
            // resignation.
            if let Ok(Err(error)) | Err(error) = self.guard.run(self.publish(None, false)).await {
                tracing::debug!(%error, "could not proclaim the resignation; releasing the lock without it");
            }
        }
        self.guard.release().await
    }

    /// Lets the next candidate be elected when the lease ends, and not at once as when the leader is dropped: see [`Guard::let_expire`].
    pub fn let_expire(self) {
        self.guard.let_expire();
    }

    async fn publish(&self, value: Option<String>, unless_published: bool) -> Result<()> {
        let clock = &*self.cas_record.keeper.0.clock;
        let mut backoff = JitteredBackoff::new(clock);
        loop {
            let old = self.cas_record.read().await?;
            let mut record = match &old {
                Some(snapshot) => ElectionRecord::parse(&self.name, &snapshot.value)?,
                None => ElectionRecord::default(),
            };
            if unless_published && record.newest().is_some_and(|p| p.term == self.term() && p.value == value)
            {
                return Ok(());
            }
            record.publish(self.term(), value.clone())?;
            match self.cas_record.swap(old.as_ref(), &record.bytes(), None, Retry::Briefly).await? {
                Ok(_) => return Ok(()),
                // Only an earlier leader can have written first; its writes are refused after this leader's
                // first one.
                Err(_) => backoff.wait().await,
            }
        }
    }

    /// Completes when the term is lost, with the reason.
    pub async fn lost(&self) -> Error {
        self.guard.lost().await
    }
}
