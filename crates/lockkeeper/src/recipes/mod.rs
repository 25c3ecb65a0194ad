//! Tools that are built on locks and records: [`Register`](crate::register::Register),
//! [`Once`](crate::once::Once), [`Cached`](crate::cached::Cached), [`Election`](crate::election::Election),
//! [`Windows`](crate::windows::Windows), [`ClaimGroup`](crate::claim::ClaimGroup),
//! [`Partitions`](crate::partitions::Partitions), and [`RateLimit`](crate::limit::RateLimit).
//!
//! A recipe uses only [`Locks`](crate::Locks), [`Records`](crate::Records) and [`Limits`](crate::Limits), so it works on
//! every store that has them, and returns [`Error::Unsupported`] on a store without them.

pub(crate) mod backoff;
pub mod cached;
pub(crate) mod cas_record;
pub(crate) mod chunks;
pub mod claim;
pub mod election;
pub(crate) mod extend;
pub(crate) mod format;
pub mod limit;
pub mod once;
pub mod partitions;
pub mod register;
pub mod windows;
pub(crate) mod write_log;

use lockkeeper_core::{Error, LockName, Result};

use crate::keeper::Lockkeeper;

/// The most bytes of a recipe's key. A lock name may have more; the rest is for the recipe's prefix.
pub const KEY_BYTES: usize = 448;

/// Refuses a store that has no records.
pub(crate) fn need_records(keeper: &Lockkeeper, recipe: &str) -> Result<()> {
    let profile = keeper.profile();
    if profile.records {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "the {} store has no records, and {recipe} needs them: use sqlite:PATH on one host, redis://HOST or etcd://HOSTS \
         for a fleet",
        profile.store
    )))
}

/// The name of a recipe's lock and record for `key`. The prefix has a fixed length, so no two keys share a
/// name.
pub(crate) fn name_of(prefix: &str, key: &str) -> Result<LockName> {
    if key.is_empty() {
        return Err(Error::invalid(format!("the key is empty: give it 1 to {KEY_BYTES} bytes of text")));
    }
    if key.len() > KEY_BYTES {
        return Err(Error::invalid(format!(
            "the key has {} bytes, {KEY_BYTES} are allowed: shorten it, or hash the long part",
            key.len()
        )));
    }
    LockName::new(format!("{prefix}{key}"))
}
