//! The keys of the table's items, and the hashes under which attempts and owners are stored.
//!
//! A name may contain any character, so the kind of an item is a prefix of its key.

use lockkeeper_core::{Attempt, LockName, Owner};
use ring::digest::{SHA256, digest};

/// The public hash of an attempt. The attempt itself, which proves ownership, cannot be computed from it.
pub fn attempt_hash(attempt: &Attempt) -> String {
    Attempt::from_bytes(hash(b"attempt", attempt.as_bytes())).to_hex()
}

/// The public hash of an owner. The owner itself allows re-entry, so it is not stored either.
pub fn owner_hash(owner: &Owner) -> Owner {
    Owner::from_bytes(hash(b"owner", owner.as_bytes()))
}

fn hash(kind: &[u8], secret: &[u8; 16]) -> [u8; 16] {
    let long = digest(&SHA256, &[kind, &secret[..]].concat());
    std::array::from_fn(|i| long.as_ref()[i])
}

/// The prefix of the keys of all locks.
pub const LOCKS: &str = "lock/";
/// The prefix of the keys of all records.
pub const RECORDS: &str = "record/";

pub fn lock(name: &LockName) -> String {
    format!("{LOCKS}{name}")
}

pub fn record(key: &LockName) -> String {
    format!("{RECORDS}{key}")
}

/// A further chunk of a record's value that is too large for one item.
pub fn chunk(key: &LockName, number: usize) -> String {
    format!("chunk/{number}/{key}")
}
