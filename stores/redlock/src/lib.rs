//! `redlock://` — locks by the vote of an odd number of independent Redis servers: a client that has locked a majority
//! holds the lock for as long as its lease lasts. The fence (the fencing token) is voted on too. The lock key is
//! the plain one that other Redlock clients use, so that all of them exclude each other.
//!
//! `docs/stores/redlock.md` has the promises, `DESIGN.md` in the crate's folder the decisions. The vote is a state machine
//! without IO, [`lockkeeper_core::vote`].
#![deny(missing_docs)]

mod acquire;
mod break_lock;
mod codec;
mod config;
mod connection;
mod counters;
mod error;
mod examine;
mod inspect;
mod keys;
mod limits;
mod profile;
mod quorum;
mod records;
mod release;
mod renew;
mod round;
mod statements;
mod store;
mod unknown;
mod waiters;

pub use config::Options;
pub use store::RedlockStore;
