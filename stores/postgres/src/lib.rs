//! `postgres://`: locks in an existing PostgreSQL database. One statement for each operation, a fence (the fencing token) with every
//! grant, a queue for waiters, and no state that depends on a connection, so that the store works behind a pooler too.
//!
//! For work in the same database there is more: [`PostgresStore::in_transaction`] takes a lock for a transaction, and
//! [`plain`] has the conditional writes that often make a lock unnecessary.
//!
//! `docs/stores/postgres.md` says what the store promises and what it does not, as does the [profile](lockkeeper_core::Profile) of an
//! open store, which depends on the server's settings. `DESIGN.md` explains the decisions.
#![deny(missing_docs)]

mod acquire;
mod batch;
mod break_lock;
mod cancel;
mod codec;
mod config;
mod connection;
mod dial;
mod driver;
mod error;
mod events;
mod examine;
mod inspect;
mod limits;
mod listener;
pub mod plain;
mod poll;
mod profile;
mod records;
mod release;
mod renew;
mod schema;
mod schema_owner;
mod server_process;
mod session;
mod shared_connection;
mod statements;
mod store;
mod sweep;
mod tls;
mod transaction;
mod unknown;
mod waiters;

pub use cancel::wait_for_cancellations;
pub use config::{Options, ServerAddr};
pub use dial::connect_to;
pub use server_process::has_own_server_process;
pub use store::PostgresStore;
pub use tls::PostgresTls as Tls;
// The driver whose types `in_transaction` and `plain` take.
pub use tokio_postgres;
