//! The errors of this store that come from no node.

use lockkeeper_core::Error;

/// The error for a feature that this store does not have.
pub fn unsupported(what: &str) -> Error {
    Error::Unsupported(format!("the redlock store has no {what}: use redis:// or sqlite: for that"))
}

/// The error for a reply that has another shape than the scripts send.
pub fn unexpected_reply() -> Error {
    Error::Unknown("a node gave an answer that makes no sense".into())
}

/// The error for a caller whose attempt was released before the nodes had decided.
pub fn cancelled_error() -> Error {
    Error::Unknown("the lock request was released before it was answered".into())
}
