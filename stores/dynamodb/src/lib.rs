//! Locks in DynamoDB: one item for each lock, conditional writes, a fence (the fencing token) that outlives every
//! release, and no shared clock.
//!
//! A condition of DynamoDB cannot compare with the current time, so the table cannot decide whether a lease has expired. A
//! client that wants the lock observes the item instead: a hold that has not changed for its whole ttl, on the client's own
//! clock, has expired. `docs/stores/dynamodb.md` has the promises, `DESIGN.md` in the crate's folder the decisions.
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
mod admission;
mod attributes;
mod backoff;
mod break_lock;
mod cas;
mod codec;
mod config;
mod connection;
mod create_table;
mod error;
mod examine;
mod inspect;
mod keys;
mod limits;
mod local_queue;
mod observation;
mod own_leases;
mod profile;
mod record_chunks;
mod record_store;
mod records;
mod release;
mod renew;
mod server_clock;
mod statements;
mod store;

pub use config::Options;
pub use create_table::{TableInit as Init, init};
pub use store::DynamoStore;
