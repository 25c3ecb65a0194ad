//! The lock requests of this process that have no answer yet, by attempt, so that a release can cancel them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use lockkeeper_core::{Attempt, IgnorePoison};
use tokio::sync::watch;

/// All pending requests of this process. A call of the same attempt that begins while another one runs shares its entry.
#[derive(Debug, Default)]
pub struct PendingRequests(Mutex<HashMap<Attempt, Weak<PendingRequest>>>);

/// One pending request. It exists for as long as a caller waits for the answer.
#[derive(Debug, Default)]
pub struct PendingRequest {
    cancelled: watch::Sender<bool>,
}

impl PendingRequest {
    /// Whether a release has cancelled the request: no grant may follow.
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
        self.0.lock().ignore_poison()
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

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: Attempt = Attempt::from_bytes([7; 16]);

    #[tokio::test]
    async fn a_release_cancels_every_call_of_the_attempt() {
        let requests = PendingRequests::default();
        let (first, again) = (requests.begin(ATTEMPT), requests.begin(ATTEMPT));
        assert!(requests.cancel(ATTEMPT));
        first.cancelled().await;
        assert!(first.is_cancelled() && again.is_cancelled());
        assert!(!requests.begin(ATTEMPT).is_cancelled(), "a later call is a request of its own");
    }

    #[test]
    fn a_dropped_call_is_not_pending() {
        let requests = PendingRequests::default();
        drop(requests.begin(ATTEMPT));
        assert!(!requests.cancel(ATTEMPT));
    }
}
