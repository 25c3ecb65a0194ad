//! Exactly what the store sends to the backend. Each statement is one atomic step: it compares and changes in one.

use std::time::Duration;

use lockkeeper_core::{Fence, Holder, HolderView};

use crate::error::Failure;

/// The reply to [`acquire`].
#[allow(dead_code, reason = "nothing is granted yet; remove this line with the first statement")]
pub enum AcquireReply {
    /// Granted now or by an earlier try of the same attempt.
    Granted(Fence),
    /// This holder has it.
    Busy(Box<HolderView>),
}

/// If the lock is free or expired: counts the fence on (`Fence::after`), and stores it with the hash, the holder and the end of the
/// lease. If the hash is the stored one: returns the stored fence, and the lease counts anew.
pub async fn acquire(
    _key: &str,
    _attempt_hash: &str,
    _holder: &Holder,
    _ttl: Duration,
) -> Result<AcquireReply, Failure> {
    Err(Failure::NotWritten("acquire"))
}

/// If the hash is the stored one and the lease has not ended: the lease counts anew. Returns whether it does.
pub async fn renew(_key: &str, _attempt_hash: &str, _ttl: Duration) -> Result<bool, Failure> {
    Err(Failure::NotWritten("renew"))
}

/// If the hash is the stored one and the lease has not ended: removes the holder. The fence stays. Returns whether it removed one.
pub async fn release(_key: &str, _attempt_hash: &str) -> Result<bool, Failure> {
    Err(Failure::NotWritten("release"))
}

/// Reads the holder, if the lease has not ended.
pub async fn inspect(_key: &str) -> Result<Option<HolderView>, Failure> {
    Err(Failure::NotWritten("inspect"))
}

/// Counts the fence on and removes the holder, in one step. Also if the lock is free.
pub async fn break_lock(_key: &str) -> Result<Fence, Failure> {
    Err(Failure::NotWritten("break a lock"))
}
