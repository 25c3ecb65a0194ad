//! Name to key, and the hash under which the backend keeps an attempt.

use lockkeeper_core::{Attempt, LockName};
use sha2::{Digest, Sha256};

/// The keys of one prefix.
#[derive(Clone, Debug)]
pub struct TemplateKeys {
    prefix: String,
}

impl TemplateKeys {
    /// The keys below `prefix`.
    pub fn new(prefix: &str) -> Self {
        TemplateKeys { prefix: prefix.to_owned() }
    }

    /// The key of a lock. A name has up to 512 bytes of any characters but control characters: escape or hash what the backend does not
    /// take, keep `a` apart from `A`, and keep the order of names if `list` is a range of keys.
    pub fn lock(&self, name: &LockName) -> String {
        format!("{}/lock/{name}", self.prefix)
    }

    /// The key of a record; a lock and a record of one name do not meet.
    #[allow(dead_code, reason = "for a store with records")]
    pub fn record(&self, key: &LockName) -> String {
        format!("{}/record/{key}", self.prefix)
    }
}

/// The hash that the backend keeps instead of the attempt: a user who can read the backend must not be able to release a lock.
pub fn attempt_hash(attempt: &Attempt) -> String {
    Sha256::digest(attempt.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}
