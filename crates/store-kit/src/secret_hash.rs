//! Hashes of the secrets of a request. Every client of a store may read what the store keeps, and a secret cannot be computed from its hash.

use lockkeeper_core::{Attempt, Owner};
use ring::digest::{SHA256, digest};

use crate::AttemptHash;

/// The hash of an attempt, which proves ownership.
pub fn hash_attempt(attempt: &Attempt) -> AttemptHash {
    sha256_prefix(b"attempt", attempt.as_bytes())
}

/// The hash of an owner, which lets a request re-enter.
pub fn hash_owner(owner: &Owner) -> Owner {
    Owner::from_bytes(sha256_prefix(b"owner", owner.as_bytes()))
}

fn sha256_prefix(domain: &[u8], secret: &[u8; 16]) -> AttemptHash {
    let long = digest(&SHA256, &[domain, &secret[..]].concat());
    std::array::from_fn(|i| long.as_ref()[i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_does_not_show_the_secret_or_its_kind() {
        let (attempt, owner) =
            (hash_attempt(&Attempt::from_bytes([0xab; 16])), hash_owner(&Owner::from_bytes([0xab; 16])));
        assert!(!Attempt::from_bytes(attempt).to_hex().contains("abab"));
        assert_ne!(Attempt::from_bytes(attempt).to_hex(), owner.to_hex(), "an attempt is no owner");
    }
}
