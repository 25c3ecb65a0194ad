//! Requests without a reply: the attempts whose requests may still arrive, and the releases that no server has answered.
//!
//! A request without a reply may be applied later than the release of its attempt, when it waited in a buffer somewhere. Such
//! a release leaves a tombstone, and the server refuses the attempt while the tombstone stands. A generation tells a request
//! from before the release from one that the caller sent after it with the same attempt.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockkeeper_core::Claim;
use tokio::sync::Notify;

use crate::hold::release_flags;
use crate::layout::Group;
use crate::store::Shared;

/// The longest pause before unanswered releases are sent again.
const MOST: Duration = Duration::from_secs(5);

/// The attempts and releases of one store whose outcome is not known.
#[derive(Default)]
pub struct Unknown {
    state: Mutex<State>,
    ring: Notify,
}

#[derive(Default)]
struct State {
    /// By attempt, in hexadecimal digits.
    attempts: HashMap<String, Unanswered>,
    /// When the oldest notes are looked for again.
    swept: Option<Instant>,
    owed: Vec<(Group, Claim, u64)>,
}

struct Unanswered {
    since: Instant,
    generation: u8,
}

impl Unknown {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an attempt whose request may have been applied, or may still be, for as long as a tombstone stands.
    pub fn note(&self, attempt: &str, life: Duration) {
        let (mut state, now) = (self.state(), Instant::now());
        if state.swept.is_none_or(|swept| swept + life < now) {
            state.swept = Some(now);
            state.attempts.retain(|_, unanswered| unanswered.since + life > now);
        }
        let unanswered =
            state.attempts.entry(attempt.into()).or_insert(Unanswered { since: now, generation: 0 });
        unanswered.since = now;
    }

    /// The generation that a request for this attempt has now.
    pub fn generation(&self, attempt: &str) -> u8 {
        let state = self.state();
        if state.attempts.is_empty() {
            0
        } else {
            state.attempts.get(attempt).map_or(0, |one| one.generation)
        }
    }

    /// The attempt is being released: the newest generation that must not be granted any more, if a request of it may
    /// still arrive. Requests from here on have a newer one.
    pub fn end(&self, attempt: &str, life: Duration) -> Option<u8> {
        let mut state = self.state();
        let unanswered = state.attempts.get_mut(attempt).filter(|one| one.since.elapsed() < life)?;
        let ended = unanswered.generation;
        unanswered.generation = ended.saturating_add(1);
        Some(ended)
    }

    /// A release that ended without an answer, or was cancelled; or a request that was in the queue when its caller heard
    /// "unknown". A queue entry does not expire while its process lives, so the store sends the release again. `limit`: the
    /// highest fence of what is meant; 0 for all.
    pub fn owe(&self, group: Group, claim: &Claim, limit: u64) {
        let mut state = self.state();
        if !state.owed.iter().any(|(_, owed, _)| owed.attempt == claim.attempt && owed.names == claim.names) {
            state.owed.push((group, claim.clone(), limit));
            self.ring.notify_one();
        }
    }

    /// The caller acquires again with this attempt: its release is not sent again.
    pub fn forget(&self, claim: &Claim) {
        self.state().owed.retain(|(_, owed, _)| owed.attempt != claim.attempt);
    }

    async fn until_owed(&self) {
        while self.state().owed.is_empty() {
            self.ring.notified().await;
        }
    }
}

/// Sends the releases again that had no answer, for as long as the store is open. Only what no guard can stand for, a queue
/// entry or an unconfirmed hold: a confirmed hold ends by its ttl.
pub async fn attend(shared: Arc<Shared>) {
    let mut pause = shared.options.poll;
    loop {
        shared.unknown.until_owed().await;
        tokio::time::sleep(pause).await;
        let owed = std::mem::take(&mut shared.unknown.state().owed);
        let sends = owed.iter().map(|(group, claim, limit)| async {
            let answer = shared.release_once(*group, claim, release_flags::UNCONFIRMED, *limit).await;
            // The caller may have acquired again meanwhile: then its waiter looks whether it is in the queue.
            let waits = shared.line.wake(&claim.attempt.to_hex());
            if answer.is_err() && !waits {
                shared.unknown.owe(*group, claim, *limit);
            }
            answer.is_ok()
        });
        let answered = join_all(sends).await.into_iter().any(|answered| answered);
        pause = if answered { shared.options.poll } else { (pause * 2).min(MOST) };
    }
}
