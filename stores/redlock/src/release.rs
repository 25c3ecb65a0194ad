//! Releases: at every node, now or as soon as it answers.

use std::sync::Arc;

use lockkeeper_core::{ReleaseOutcome, RequestKey, Result};
use redis::Value;

use crate::connection::{NodeRelease, RedlockNode};
use crate::counters::Counters;
use crate::keys::Keys;
use crate::quorum::{NodeReplies, Quorum};
use crate::unknown::PendingAttempts;

/// Releases locks.
pub struct Releaser {
    pub quorum: Arc<Quorum>,
    pub keys: Arc<Keys>,
    pub counters: Arc<Counters>,
    pub pending: Arc<PendingAttempts>,
}

impl Releaser {
    /// Releases at every node, and cancels the rounds in flight. A node that does not reply, or refuses, is called again
    /// in the background until it has released the lock or the ttl is over.
    pub async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let asked = self.pending.cancel(key.attempt);
        let [lock, vote] = self.keys.lock_and_vote(key.names.first());
        let until = self.quorum.options.clock.now() + self.quorum.options.max_ttl;
        let channel = self.keys.channel(&lock);
        let release = NodeRelease::of_all(
            [lock, vote],
            &key.attempt.to_hex(),
            self.counters.next_round(),
            channel,
            until,
        );
        let work = |node: Arc<RedlockNode>| {
            let release = release.clone();
            async move { node.release_or_enqueue(release).await.map(|was_there| Value::Int(was_there.into())) }
        };
        let enough = |answers: &NodeReplies| {
            answers.iter().filter(|answer| matches!(answer, Some(Ok(_)))).count() >= self.quorum.size
        };
        let answers = self.quorum.call_all(self.quorum.options.node_timeout, work, enough).await;
        // A majority has no key of this attempt any more, so the attempt does not hold the lock. It did, if any node still
        // had it.
        let done = self.quorum.require_majority_of_writes(answers)?;
        let was_there = asked || done.iter().any(|(_, answer)| *answer == Value::Int(1));
        Ok(if was_there { ReleaseOutcome::Released } else { ReleaseOutcome::AlreadyGone })
    }
}
