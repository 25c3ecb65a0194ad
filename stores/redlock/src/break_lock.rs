//! Breaking a lock, and revoking it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lockkeeper_core::{Error, Fence, LockName, Result, Wall};
use redis::Value;

use crate::node::Node;
use crate::quorum::{Answers, odd};
use crate::script::{BREAK, Call, RAISE, REVOKE};
use crate::store::{COUNTER, Shared};

impl Shared {
    /// Takes the lock away at every node that answers, and moves the fence on at a majority.
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let [lock, vote] = self.keys(name);
        let channel = self.channel(&lock);
        let call = Call::new(&BREAK, &[lock, vote, COUNTER.to_owned()][..]).arg(channel);
        let mut seen = Vec::new();
        for (_, answer) in self.majority_did(self.everywhere(&call).await)? {
            let Value::Array(parts) = answer else { return Err(odd()) };
            let [Value::Int(counter), Value::Int(now)] = parts[..] else { return Err(odd()) };
            seen.push((counter, now));
        }
        let fence = self.move_fence_on(seen).await?;
        tracing::info!(%name, reason, %fence, "a lock was broken");
        Ok(fence)
    }

    /// Asks the holder to release the lock, without letting in a waiter before it has. Every node of a majority either marks the
    /// grant or does not have it, so that no majority can renew it any more.
    pub async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let [lock, vote] = self.keys(name);
        let call = Call::new(&REVOKE, &[lock, vote, COUNTER.to_owned()][..]).arg(reason);
        let (mut seen, mut foreign) = (Vec::new(), 0);
        for (_, answer) in self.majority_did(self.everywhere(&call).await)? {
            let Value::Array(parts) = answer else { return Err(odd()) };
            let [Value::Int(counter), Value::Int(now), Value::Int(found)] = parts[..] else {
                return Err(odd());
            };
            seen.push((counter, now));
            foreign += usize::from(found == 2);
        }
        if foreign >= self.quorum {
            return Err(Error::Unsupported(format!(
                "another Redis client holds {name}, and it would not learn that it is to stop: wait for it, or break the \
                 lock at once"
            )));
        }
        let fence = self.move_fence_on(seen).await?;
        tracing::info!(%name, reason, %fence, "a lock was revoked");
        Ok(fence)
    }

    /// Writes a fence to a majority that is above the counters and the clocks that the nodes answered with.
    async fn move_fence_on(&self, seen: Vec<(i64, i64)>) -> Result<Fence> {
        let mut highest = Fence::new(self.floor.load(Ordering::Relaxed)).ok();
        let mut clock = Wall::default();
        for (counter, now) in seen {
            highest = highest.max(u64::try_from(counter).ok().and_then(|n| Fence::new(n).ok()));
            clock = clock.max(Wall::from_micros(u64::try_from(now).unwrap_or(0)));
        }
        let fence = Fence::after(highest, clock)?;
        let raise = Call::new(&RAISE, &[COUNTER]).arg(fence.get());
        // The lock is changed already: what is not known is only whether the fence has moved on.
        self.majority_of(self.everywhere(&raise).await).map_err(|error| Error::Unknown(error.to_string()))?;
        self.seen(fence);
        Ok(fence)
    }

    async fn everywhere(&self, call: &Call) -> Answers {
        let work = |node: Arc<Node>| {
            let call = call.clone();
            async move { call.run(&node.link).await }
        };
        self.hear(self.options.node_timeout, work, |_| false).await
    }
}
