//! Releases: at every node, now or as soon as it answers.

use std::sync::Arc;

use lockkeeper_core::{Claim, Release, Result};
use redis::Value;

use crate::node::{Debt, Node};
use crate::quorum::Answers;
use crate::store::Shared;

impl Shared {
    /// Releases at every node, and withdraws what is in flight. A node that does not answer, or refuses, is asked again
    /// in the background until it has released the lock or the ttl is over.
    pub async fn release(&self, claim: &Claim) -> Result<Release> {
        let asked = self.errands.withdraw(claim.attempt);
        let [lock, vote] = self.keys(claim.names.first());
        let until = self.options.clock.now() + self.options.max_ttl;
        let channel = self.channel(&lock);
        let debt = Debt::of_all([lock, vote], &claim.attempt.to_hex(), self.number(), channel, until);
        let work = |node: Arc<Node>| {
            let debt = debt.clone();
            async move { node.give_back(debt).await.map(|was_there| Value::Int(was_there.into())) }
        };
        let enough = |answers: &Answers| {
            answers.iter().filter(|answer| matches!(answer, Some(Ok(_)))).count() >= self.quorum
        };
        let answers = self.hear(self.options.node_timeout, work, enough).await;
        // A majority has nothing of this attempt any more, so nobody holds the lock by it. Somebody did, if any node still
        // had it.
        let done = self.majority_did(answers)?;
        let was_there = asked || done.iter().any(|(_, answer)| *answer == Value::Int(1));
        Ok(if was_there { Release::Released } else { Release::AlreadyGone })
    }
}
