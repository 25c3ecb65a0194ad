//! `sqlite:PATH` — locks in one SQLite file, shared by all processes of a host.
//!
//! No server and no set-up: the first process makes the file. Grant, fence and expiry are one transaction; a fence
//! never goes back, not even when the file is deleted or restored from an old copy; a holder that dies frees its locks
//! at once; and those who wait stand in line and are woken one at a time.
//!
//! Read `store.rs` for the doors, `worker.rs` for the thread that has the file, `line.rs` for how asks wait, and
//! `script.rs` for everything that is said to SQLite. The page in `docs/stores/sqlite.md` says what it does not promise.
#![deny(missing_docs)]

mod batch;
mod busy;
mod config;
mod deadlock;
mod events;
mod fault;
mod files;
mod floor;
mod gather;
mod hold;
mod line;
mod locals;
mod open;
mod pending;
mod place;
mod post;
mod records;
mod revoke;
mod rows;
mod script;
mod store;
mod tx;
mod view;
mod waker;
mod watch;
mod worker;

pub use config::Options;
pub use store::SqliteStore;
