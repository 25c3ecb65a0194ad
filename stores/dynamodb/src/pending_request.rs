//! The lock requests of this process that have no answer yet, by attempt, so that a release can cancel them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lockkeeper_core::{Attempt, Error};
use tokio::sync::watch;

/// All pending requests of this process.
#[derive(Debug, Default)]
pub struct PendingRequests(Mutex<HashMap<Attempt, Weak<PendingRequest>>>);

/// One pending request. It exists for as long as a caller waits for the answer.
#[derive(Debug, Default)]
pub struct PendingRequest {
    cancelled: watch::Sender<bool>,
}

impl PendingRequest {
    pub fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Returns when a release cancels the request.
    pub async fn cancelled(&self) {
        // `self` owns the sender, so the channel cannot be closed.
        _ = self.cancelled.subscribe().wait_for(|cancelled| *cancelled).await;
    }
}

impl PendingRequests {
    fn by_attempt(&self) -> MutexGuard<'_, HashMap<Attempt, Weak<PendingRequest>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pending request of an attempt: the existing one, or a new one.
    pub fn begin(&self, attempt: Attempt) -> Arc<PendingRequest> {
        let mut by_attempt = self.by_attempt();
        if let Some(pending) = by_attempt.get(&attempt).and_then(Weak::upgrade)
            && !pending.is_cancelled()
        {
            return pending;
        }
        by_attempt.retain(|_, pending| pending.strong_count() > 0);
        let pending = Arc::new(PendingRequest::default());
        by_attempt.insert(attempt, Arc::downgrade(&pending));
        pending
    }

    /// Cancels the request of an attempt. Returns whether a caller was still waiting for it.
    pub fn cancel(&self, attempt: Attempt) -> bool {
        let Some(pending) = self.by_attempt().remove(&attempt).and_then(|pending| pending.upgrade()) else {
            return false;
        };
        pending.cancelled.send_replace(true);
        true
    }
}

/// The answer to a caller whose request was released before it was answered.
pub fn cancelled_error() -> Error {
    Error::Unknown("the lock request was released before it was answered".into())
}
