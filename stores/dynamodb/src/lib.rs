//! Locks in DynamoDB: one item for each lock, conditional writes, a fence that outlives every release, and no shared clock.
//!
//! DynamoDB does not tell the time to a condition, so nobody can ask it whether a lease is over. Whoever wants a lock watches
//! it instead: a hold that has not changed for its whole ttl, on the watcher's own clock, is over. What is promised, and
//! what is not, is in `docs/stores/dynamodb.md`.
//!
//! ```no_run
//! # async fn example() -> lockkeeper_core::Result<()> {
//! use lockkeeper_dynamodb::{DynamoStore, Options};
//! let store = DynamoStore::open(Options::from_url("dynamodb://eu-central-1/locks")?).await?;
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs)]

mod acquire;
mod book;
mod config;
mod errand;
mod fault;
mod hold;
mod init;
mod layout;
mod link;
mod open;
mod parts;
mod records;
mod revoke;
mod script;
mod sight;
mod step;
mod store;
mod view;
mod wait;
mod wall;

pub use config::Options;
pub use init::{Init, init};
pub use store::DynamoStore;
