//! `postgres://` — locks in a PostgreSQL database that is there already: one statement for each step, a fence with every
//! grant, a line for those who wait, and nothing that depends on a connection, so that it works behind a pooler too.
//!
//! For work in the same database there is more: [`PostgresStore::in_transaction`] takes a lock for a transaction, and
//! [`plain`] has what often makes a lock unnecessary.
//!
//! What it promises and what not is in `docs/stores/postgres.md`, and in the [profile](lockkeeper_core::Profile) of an
//! open store, which depends on how the server is set up.
#![deny(missing_docs)]

mod config;
mod doubt;
mod entry;
mod fault;
mod hold;
mod install;
mod lane;
mod line;
mod link;
mod open;
pub mod plain;
mod records;
mod script;
mod store;
mod talk;
mod tls;
mod transaction;
mod trust;
mod view;
mod watch;

pub use config::{Door, Options};
pub use link::connect_to;
pub use store::PostgresStore;
pub use tls::Tls;
// What `in_transaction` and `plain` are called with.
pub use tokio_postgres;
