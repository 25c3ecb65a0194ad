//! The requests in flight of each attempt, so that a release can cancel all of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use lockkeeper_core::{Attempt, IgnorePoison};
use tokio::sync::watch;

/// A round in flight, as a release sees it.
pub trait PendingRound: Send + Sync {
    /// Cancels the round: it grants nothing any more, and every node releases the lock.
    fn cancel(&self);
}

type PendingRounds = Vec<Weak<dyn PendingRound>>;

/// The calls and rounds of one attempt. It exists while a caller or a background task works for the attempt.
#[derive(Default)]
pub struct PendingAttempt {
    cancelled: watch::Sender<bool>,
    /// How many callers wait for an answer.
    callers: AtomicUsize,
    rounds: Mutex<PendingRounds>,
}

impl PendingAttempt {
    fn rounds(&self) -> MutexGuard<'_, PendingRounds> {
        self.rounds.lock().ignore_poison()
    }

    /// Adds a round. If the attempt is cancelled already, cancels the round.
    pub fn add(&self, round: &Arc<dyn PendingRound>) {
        let mut rounds = self.rounds();
        rounds.retain(|round| round.strong_count() > 0);
        rounds.push(Arc::downgrade(round));
        drop(rounds);
        if self.is_cancelled() {
            round.cancel();
        }
    }

    pub fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Returns when a release cancels the attempt.
    pub async fn cancelled(&self) {
        // `self` owns the sender, so the channel cannot be closed.
        _ = self.cancelled.subscribe().wait_for(|cancelled| *cancelled).await;
    }

    /// Counts a caller, until the return value is dropped.
    pub fn count_caller(self: &Arc<Self>) -> CallerCount {
        self.callers.fetch_add(1, Ordering::SeqCst);
        CallerCount(self.clone())
    }
}

/// A caller that waits for its answer.
pub struct CallerCount(Arc<PendingAttempt>);

impl Drop for CallerCount {
    fn drop(&mut self) {
        self.0.callers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The pending attempts of this process.
#[derive(Default)]
pub struct PendingAttempts(Mutex<AttemptMap>);

#[derive(Default)]
struct AttemptMap {
    by_attempt: HashMap<Attempt, Weak<PendingAttempt>>,
    /// At this number of entries those without a pending attempt are removed.
    sweep_at: usize,
}

impl PendingAttempts {
    /// The pending attempt: the existing one, or a new one.
    pub fn begin(&self, attempt: Attempt) -> Arc<PendingAttempt> {
        let mut map = self.0.lock().ignore_poison();
        if let Some(known) = map.by_attempt.get(&attempt).and_then(Weak::upgrade)
            && !known.is_cancelled()
        {
            return known;
        }
        if map.by_attempt.len() >= map.sweep_at {
            map.by_attempt.retain(|_, pending| pending.strong_count() > 0);
            map.sweep_at = 2 * map.by_attempt.len() + 64;
        }
        let pending = Arc::new(PendingAttempt::default());
        map.by_attempt.insert(attempt, Arc::downgrade(&pending));
        pending
    }

    /// Cancels everything in flight for an attempt. Returns whether a caller was still waiting.
    pub fn cancel(&self, attempt: Attempt) -> bool {
        let map = self.0.lock().ignore_poison();
        let Some(pending) = map.by_attempt.get(&attempt).and_then(Weak::upgrade) else { return false };
        drop(map);
        // Read first: a cancelled caller may return at once.
        let was_pending = pending.callers.load(Ordering::SeqCst) > 0;
        pending.cancelled.send_replace(true);
        for round in pending.rounds().iter().filter_map(Weak::upgrade) {
            round.cancel();
        }
        was_pending
    }
}
