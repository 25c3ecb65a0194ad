//! The stored format: a held lock, as its file has it.

use lockkeeper_core::{
    Attempt, BootInstant, Fence, Grant, Holder, HolderView, LockName, LockRequest, LockView, Mode, WallTime,
};
use serde::{Deserialize, Serialize};

use crate::keys::hash;

/// A held lock.
#[derive(Serialize, Deserialize)]
pub struct StoredLock {
    pub name: LockName,
    /// Never the attempt itself: a user who may read the directory must not be able to release the lock.
    pub attempt_hash: String,
    pub fence: Fence,
    pub holder: Holder,
    pub since: WallTime,
    /// On the boot-time clock, so only with the boot that it belongs to.
    pub expires_ns: u64,
    pub boot: Option<String>,
}

impl StoredLock {
    pub fn expires(&self) -> BootInstant {
        BootInstant::from_nanos(self.expires_ns)
    }

    pub fn belongs_to(&self, attempt: &Attempt) -> bool {
        self.attempt_hash == hash(attempt.as_bytes())
    }

    /// The grant of a request that this lock was stored for at `sent_at`.
    pub fn grant(&self, request: &LockRequest, sent_at: BootInstant) -> Grant {
        let (key, ttl) = (request.key.clone(), request.ttl);
        Grant { key, fence: self.fence, mode: Mode::Exclusive, ttl, sent_at, lease: ttl }
    }

    pub fn view(&self, now: BootInstant) -> LockView {
        // Rounded up: a lease that still runs never shows zero.
        let left = self.expires().since(now).as_nanos().div_ceil(1_000_000) as u64;
        let (holder, fence, since) = (self.holder.clone(), self.fence, self.since);
        let mode = Mode::Exclusive;
        let held =
            HolderView { holder, fence, mode, since, expires_in_ms: left, lingering: false, revoked: None };
        LockView::exclusive(self.name.clone(), held)
    }
}
