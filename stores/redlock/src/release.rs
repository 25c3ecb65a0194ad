//! Releases: at every node, now or as soon as it answers.

use std::sync::Arc;

use lockkeeper_core::{ReleaseOutcome, RequestKey, Result};
use redis::Value;

use crate::connection::{NodeRelease, RedlockNode};
use crate::quorum::NodeReplies;
use crate::store::RedlockInner;

impl RedlockInner {
    /// Releases at every node, and cancels the rounds in flight. A node that does not reply, or refuses, is called again
    /// in the background until it has released the lock or the ttl is over.
    pub async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let asked = self.pending.cancel(key.attempt);
        let [lock, vote] = self.keys(key.names.first());
        let until = self.options.clock.now() + self.options.max_ttl;
        let channel = self.channel(&lock);
        let release =
            NodeRelease::of_all([lock, vote], &key.attempt.to_hex(), self.next_round(), channel, until);
        let work = |node: Arc<RedlockNode>| {
            let release = release.clone();
            async move { node.release_or_enqueue(release).await.map(|was_there| Value::Int(was_there.into())) }
        };
        let enough = |answers: &NodeReplies| {
            answers.iter().filter(|answer| matches!(answer, Some(Ok(_)))).count() >= self.quorum
        };
        let answers = self.call_all(self.options.node_timeout, work, enough).await;
        // A majority has no key of this attempt any more, so the attempt does not hold the lock. It did, if any node still
        // had it.
        let done = self.require_majority_of_writes(answers)?;
        let was_there = asked || done.iter().any(|(_, answer)| *answer == Value::Int(1));
        Ok(if was_there { ReleaseOutcome::Released } else { ReleaseOutcome::AlreadyGone })
    }
}
