//! The stored format: bytes of the backend to a struct and back. `tests/golden` keeps bytes of every version.

use lockkeeper_core::{Fence, HolderView};

use crate::error::Failure;

/// The version of the format. Raise it when the format changes, and keep reading the version before.
pub const FORMAT: u8 = 1;

/// A lock as the backend stores it: also without a holder, because the fence outlives the lock.
#[derive(Debug)]
pub struct StoredLock {
    /// The last fence.
    #[allow(dead_code, reason = "nothing is stored yet; remove this line with the first statement")]
    pub fence: Fence,
    /// The holder, if the lease has not ended.
    pub holder: Option<HolderView>,
}

/// Reads a stored lock. Fill in: the fields behind the version. Another version is rejected: a store that guesses grants a lock twice.
pub fn decode(bytes: &[u8]) -> Result<Option<StoredLock>, Failure> {
    match bytes.first() {
        None => Ok(None),
        Some(&FORMAT) => Err(Failure::NotWritten("decode a lock")),
        Some(other) => Err(Failure::Rejected(format!(
            "the stored format {other} is not known: this version reads {FORMAT}"
        ))),
    }
}
