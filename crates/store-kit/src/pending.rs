//! The lock requests of this process that have no answer yet, by attempt, so that a release can cancel them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use lockkeeper_core::{Attempt, IgnorePoison};
use tokio::sync::Notify;

/// The least number of entries before the first sweep.
const MIN_SWEEP: usize = 64;

/// All pending requests of this process. A call of the same attempt that begins while another one runs shares its entry.
///
/// An entry whose callers have ended stays until its attempt is released, or until a sweep. A sweep takes place when the number of entries
/// has doubled since the last one, so the cost of a call does not grow with the number of calls that wait.
#[derive(Debug, Default)]
pub struct PendingRequests(Mutex<RequestsByAttempt>);

#[derive(Debug, Default)]
struct RequestsByAttempt {
    requests: HashMap<Attempt, Weak<PendingRequest>>,
    /// The number of entries at which the next sweep takes place.
    sweep_at: usize,
}

/// One pending request. It exists for as long as a caller waits for the answer.
#[derive(Debug, Default)]
pub struct PendingRequest {
    cancelled: AtomicBool,
    changed: Notify,
}

impl PendingRequest {
    /// Whether a release has cancelled the request: no grant may follow.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Returns when a release cancels the request.
    pub async fn cancelled(&self) {
        // A `Notified` receives every later `notify_waiters`, also before it is polled.
        let changed = self.changed.notified();
        if !self.is_cancelled() {
            changed.await;
        }
    }

    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }
}

impl PendingRequests {
    fn by_attempt(&self) -> MutexGuard<'_, RequestsByAttempt> {
        self.0.lock().ignore_poison()
    }

    /// The pending request of an attempt: the existing one, or a new one.
    pub fn begin(&self, attempt: Attempt) -> Arc<PendingRequest> {
        let mut by_attempt = self.by_attempt();
        if let Some(pending) = by_attempt.requests.get(&attempt).and_then(Weak::upgrade) {
            return pending;
        }
        by_attempt.sweep();
        let pending = Arc::new(PendingRequest::default());
        by_attempt.requests.insert(attempt, Arc::downgrade(&pending));
        pending
    }

    /// Cancels the request of an attempt. Returns whether a caller was still waiting for it.
    pub fn cancel(&self, attempt: Attempt) -> bool {
        let pending = self.by_attempt().requests.remove(&attempt).and_then(|pending| pending.upgrade());
        if let Some(pending) = &pending {
            pending.cancel();
        }
        pending.is_some()
    }
}

impl RequestsByAttempt {
    /// Removes the entries whose callers have ended, if enough entries were added since the last sweep.
    fn sweep(&mut self) {
        if self.requests.len() >= self.sweep_at.max(MIN_SWEEP) {
            self.requests.retain(|_, pending| pending.strong_count() > 0);
            self.sweep_at = self.requests.len() * 2;
        }
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

    #[tokio::test]
    async fn a_caller_that_waits_is_woken() {
        let requests = PendingRequests::default();
        let pending = requests.begin(ATTEMPT);
        let ((), cancelled) = tokio::join!(pending.cancelled(), async { requests.cancel(ATTEMPT) });
        assert!(cancelled);
    }

    #[test]
    fn entries_of_ended_calls_do_not_pile_up() {
        let requests = PendingRequests::default();
        let numbered = |number: u32| Attempt::from_bytes(u128::from(number).to_be_bytes());
        let waiting: Vec<_> = (0..100).map(|number| requests.begin(numbered(number))).collect();
        for number in 100..10_000 {
            drop(requests.begin(numbered(number)));
        }
        assert!(requests.by_attempt().requests.len() <= 2 * waiting.len());
        assert!((0..100).all(|number| requests.cancel(numbered(number))), "calls that wait stay");
    }
}
