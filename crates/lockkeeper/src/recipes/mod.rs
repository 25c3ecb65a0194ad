//! What people build out of locks and records, built once: [`Register`](crate::Register), [`Once`](crate::Once),
//! [`Election`](crate::Election) and [`Windows`](crate::Windows).
//!
//! Each of them needs nothing but [`Locks`](crate::Locks) and [`Records`](crate::Records), so each works on every store
//! that has records, and is [`Error::Unsupported`] on one that has none.

pub(crate) mod backoff;
pub(crate) mod cell;
pub(crate) mod election;
pub(crate) mod once;
pub(crate) mod register;
pub(crate) mod trail;
pub(crate) mod windows;

use lockkeeper_core::{Error, LockName, Result};

use crate::keeper::Lockkeeper;

/// Bytes of a name that a recipe is called by. A lock name may have more; the rest is for the recipe's own words.
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

/// The name of what a recipe keeps for `key`. The prefix has a fixed length, so no two keys share a name.
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
