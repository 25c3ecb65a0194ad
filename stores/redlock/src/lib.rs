//! `redlock://` — locks by the vote of an odd number of independent Redis servers: whoever has a majority has the lock,
//! for as long as its lease lasts. The fence is voted on too. The lock key is the plain one that other Redlock clients
//! use, so that all of them exclude each other.
//!
//! What it promises and what not is in `docs/stores/redlock.md`. The vote itself is [`lockkeeper_core::vote`].
#![deny(missing_docs)]

mod acquire;
mod break_lock;
mod config;
mod entry;
mod errand;
mod line;
mod node;
mod open;
mod quorum;
mod records;
mod release;
mod renew;
mod round;
mod script;
mod store;
mod view;

pub use config::Options;
pub use store::RedlockStore;
