//! `redis://` — locks in Redis: one script and one round trip for each step, a fence with every grant, a line for those
//! who wait, and the plain lock key that every other Redis lock client uses, so that all of them exclude each other.
//!
//! What it promises and what not is in `docs/stores/redis.md`, and in the [profile](lockkeeper_core::Profile) of an
//! open store, which depends on how the server is set up.
#![deny(missing_docs)]

mod across;
mod config;
mod entry;
mod fault;
mod fleet;
mod hold;
mod lane;
mod layout;
mod line;
mod link;
mod open;
mod records;
mod revoke;
mod script;
mod sentinel;
mod split;
mod store;
mod tls;
mod topology;
mod unknown;
mod view;
mod watch;

pub use config::{Options, Servers};
pub use fault::Failure;
pub use link::{Access, Answered, Door, Greeting, Heard, Link, Listener};
pub use store::RedisStore;
pub use tls::Tls;
