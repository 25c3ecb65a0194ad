//! How a release cancels an acquire call of the same attempt that still runs.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Connects a running acquire call with the release that cancels it.
#[derive(Debug, Default)]
pub struct CancelSignal {
    cancelled: AtomicBool,
    left_queue: AtomicBool,
    changed: Notify,
}

impl CancelSignal {
    /// Waits until a release cancels the call. One task waits for it, the call itself.
    pub async fn cancelled(&self) {
        while !self.is_cancelled() {
            self.changed.notified().await;
        }
    }

    /// Whether a release has cancelled the call.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Cancels the call.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// The cancelled call is about to leave the queue itself, possibly before the release that cancelled it does so.
    pub fn note_left_queue(&self) {
        self.left_queue.store(true, Ordering::Release);
    }

    /// Whether the call has left the queue itself: the release that finds no queue entry still reports *released*.
    pub fn has_left_queue(&self) -> bool {
        self.left_queue.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_that_is_cancelled_before_it_waits_ends_at_once() {
        let signal = CancelSignal::default();
        assert!(!signal.is_cancelled());
        signal.cancel();
        signal.cancelled().await;
        assert!(signal.is_cancelled() && !signal.has_left_queue());
    }

    #[tokio::test]
    async fn a_call_that_waits_is_woken() {
        let signal = std::sync::Arc::new(CancelSignal::default());
        let call = tokio::spawn({
            let signal = signal.clone();
            async move { signal.cancelled().await }
        });
        tokio::task::yield_now().await;
        signal.cancel();
        call.await.unwrap();
    }
}
