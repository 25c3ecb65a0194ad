//! Breaking a lock, and revoking it.

use std::sync::Arc;

use lockkeeper_core::{Error, Fence, LockName, Result, WallTime};
use redis::Value;

use crate::counters::Counters;
use crate::error::unexpected_reply;
use crate::keys::{FENCE_COUNTER, Keys};
use crate::quorum::Quorum;
use crate::statements::{BREAK, RAISE, REVOKE, ScriptCall};

/// Breaks and revokes locks.
pub struct LockBreaker {
    pub quorum: Arc<Quorum>,
    pub keys: Arc<Keys>,
    pub counters: Arc<Counters>,
}

impl LockBreaker {
    /// Deletes the lock at every node that replies, and raises the fence counter at a majority.
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let keys = self.keys.lock_vote_and_counter(name);
        let call = ScriptCall::new(&BREAK, &keys[..]).arg(self.keys.channel(&keys[0]));
        let mut seen = Vec::new();
        for (_, answer) in self.quorum.require_majority_of_writes(self.quorum.run_on_all(&call).await)? {
            let Value::Array(parts) = answer else { return Err(unexpected_reply()) };
            let [Value::Int(counter), Value::Int(now)] = parts[..] else { return Err(unexpected_reply()) };
            seen.push((counter, now));
        }
        let fence = self.advance_fence(seen).await?;
        tracing::info!(%name, reason, %fence, "a lock was broken");
        Ok(fence)
    }

    /// Marks the grant as revoked. No waiter is granted the lock before the holder has stopped or its lease has ended. Every node of a majority either marks the
    /// grant or does not have it, so that no majority can renew it any more.
    pub async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let call = ScriptCall::new(&REVOKE, &self.keys.lock_vote_and_counter(name)[..]).arg(reason);
        let (mut seen, mut foreign) = (Vec::new(), 0);
        for (_, answer) in self.quorum.require_majority_of_writes(self.quorum.run_on_all(&call).await)? {
            let Value::Array(parts) = answer else { return Err(unexpected_reply()) };
            let [Value::Int(counter), Value::Int(now), Value::Int(found)] = parts[..] else {
                return Err(unexpected_reply());
            };
            seen.push((counter, now));
            foreign += usize::from(found == 2);
        }
        if foreign >= self.quorum.size {
            return Err(Error::Unsupported(format!(
                "another Redis client holds {name}, and it would not learn that it is to stop: wait for it, or break the \
                 lock at once"
            )));
        }
        let fence = self.advance_fence(seen).await?;
        tracing::info!(%name, reason, %fence, "a lock was revoked");
        Ok(fence)
    }

    /// Writes a fence to a majority that is above the counters and the clocks that the nodes answered with.
    async fn advance_fence(&self, seen: Vec<(i64, i64)>) -> Result<Fence> {
        let mut highest = self.counters.highest_fence_seen();
        let mut clock = WallTime::default();
        for (counter, now) in seen {
            highest = highest.max(u64::try_from(counter).ok().and_then(|n| Fence::new(n).ok()));
            clock = clock.max(WallTime::from_micros(u64::try_from(now).unwrap_or(0)));
        }
        let fence = Fence::after(highest, clock)?;
        let raise = ScriptCall::new(&RAISE, &[FENCE_COUNTER]).arg(fence.get());
        // The nodes have changed the lock already; only whether the counter was raised is unknown.
        self.quorum
            .require_majority(self.quorum.run_on_all(&raise).await)
            .map_err(|error| Error::Unknown(error.to_string()))?;
        self.counters.record_fence(fence);
        Ok(fence)
    }
}
