//! Which key is what. Names may have anything in them, so what a key is stands in front.

use lockkeeper_core::{Attempt, LockName, Owner};
use ring::digest::{SHA256, digest};

/// What an attempt is called where everybody may see it. The attempt cannot be found from it.
pub fn mark(attempt: &Attempt) -> String {
    Attempt::from_bytes(hash(b"attempt", attempt.as_bytes())).to_hex()
}

/// An owner is what lets others re-enter: it is not shown either.
pub fn owner_mark(owner: &Owner) -> Owner {
    Owner::from_bytes(hash(b"owner", owner.as_bytes()))
}

fn hash(what: &[u8], secret: &[u8; 16]) -> [u8; 16] {
    let long = digest(&SHA256, &[what, &secret[..]].concat());
    std::array::from_fn(|i| long.as_ref()[i])
}

/// What the keys of all locks begin with.
pub const LOCKS: &str = "lock/";
/// What the keys of all records begin with.
pub const RECORDS: &str = "record/";

pub fn lock(name: &LockName) -> String {
    format!("{LOCKS}{name}")
}

pub fn record(key: &LockName) -> String {
    format!("{RECORDS}{key}")
}

/// The rest of a value that is too large for one item.
pub fn part(key: &LockName, number: usize) -> String {
    format!("part/{number}/{key}")
}
