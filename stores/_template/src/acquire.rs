//! Acquire: one try, and the wait for the next one.

use lockkeeper_core::{AcquireOutcome, Busy, Fence, Grant, HolderView, LockRequest, Mode, Result};

use crate::TemplateStore;
use crate::keys::attempt_hash;

/// The reply of the backend to one try.
#[allow(dead_code, reason = "nothing is granted yet; remove this line with the first statement")]
pub enum AcquireReply {
    /// Granted now or by an earlier try of the same attempt.
    Granted(Fence),
    /// This holder has it.
    Busy(Box<HolderView>),
}

impl TemplateStore {
    /// Fill in: the wait. Until `request.wait.deadline(now)`, enqueue or poll. A release of the same attempt from another task ends the
    /// wait and returns `Released`; no grant may follow it (`store_kit::PendingRequests` lists the calls that wait). A dropped
    /// future leaves no task that could still be granted the lock.
    pub(crate) async fn try_acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let (key, name, ttl) = (request.key.clone(), request.key.names.first(), request.ttl);
        // Before the request leaves, for every try anew: the guard's deadline counts from here.
        let sent_at = self.options.clock.now();
        let hash = attempt_hash(&key.attempt);
        Ok(match self.connection.acquire(&self.keys.lock(name), &hash, &request.holder, ttl).await? {
            AcquireReply::Granted(fence) => {
                AcquireOutcome::Granted(Grant { key, fence, mode: Mode::Exclusive, ttl, sent_at, lease: ttl })
            }
            AcquireReply::Busy(holder) => {
                AcquireOutcome::Busy(Busy { name: name.clone(), held: vec![*holder], waiting: 0 })
            }
        })
    }
}
