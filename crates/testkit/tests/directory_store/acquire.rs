//! Acquire: one try under the flock, and polls until the wait is over.

use std::time::Duration;

use lockkeeper_core::{AcquireOutcome, Busy, LockRequest, Result};
use lockkeeper_store_kit::PendingRequest;

use crate::codec::StoredLock;
use crate::error::unknown;
use crate::keys::hash;
use crate::store::DirectoryStore;

/// Between two polls of a waiter. In real time, also under a virtual clock: that one stands still while a law waits for a grant.
const POLL: Duration = Duration::from_millis(5);

impl DirectoryStore {
    pub(crate) async fn poll(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let deadline = request.wait.deadline(self.clock.now());
        let call = self.pending.begin(request.key.attempt);
        loop {
            let outcome = self.try_acquire(request, &call)?;
            if matches!(outcome, AcquireOutcome::Granted(_)) || self.clock.now() >= deadline {
                return Ok(outcome);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// One try: grants the lock, finds the grant that this attempt has already, or names the holder.
    fn try_acquire(&self, request: &LockRequest, call: &PendingRequest) -> Result<AcquireOutcome> {
        let files = self.files()?;
        // Under the flock, as the release does: no grant follows a release.
        if call.is_cancelled() {
            return Err(unknown("the request was released"));
        }
        // After the wait for the flock, or a lease could begin before the one ahead of it has ended.
        let (now, name) = (self.clock.now(), request.key.names.first());
        let (fence, since) = match files.read(name, now)? {
            Some(own) if own.belongs_to(&request.key.attempt) => (own.fence, own.since),
            Some(other) => {
                let held = other.view(now).held;
                return Ok(AcquireOutcome::Busy(Busy { name: name.clone(), held, waiting: 0 }));
            }
            None => (files.next_fence(self.clock.wall())?, self.clock.wall()),
        };
        let lock = StoredLock {
            name: name.clone(),
            attempt_hash: hash(request.key.attempt.as_bytes()),
            fence,
            holder: (*request.holder).clone(),
            since,
            expires_ns: (now + request.ttl).as_nanos(),
            boot: self.boot.clone(),
        };
        files.write(&lock)?;
        Ok(AcquireOutcome::Granted(lock.grant(request, now)))
    }
}
