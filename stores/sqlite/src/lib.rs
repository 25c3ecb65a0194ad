//! `sqlite:PATH` — locks in one SQLite file, shared by all processes of a host.
//!
//! No server and no set-up: the first process creates the file. Grant, fence (the fencing token) and expiry are one transaction. A fence
//! never goes back, not even if the file is deleted or restored from an old copy. If a holder's process ends, its locks are free at
//! once. Waiters are queued, and one release wakes one process.
//!
//! Start with `store.rs` (the traits), `worker.rs` (the thread that uses the file), `queue.rs` (how requests wait) and
//! `statements.rs` (all SQL). `DESIGN.md` has the decisions, and `docs/stores/sqlite.md` what the store does not promise.
#![deny(missing_docs)]

mod acquire;
mod batch;
mod batch_delay;
mod break_lock;
mod busy_handler;
mod codec;
mod config;
mod connection;
mod db_files;
mod db_path;
mod deadlock;
mod deliver_events;
mod error;
mod events;
mod examine;
mod fence_floor;
mod file_version;
mod holds;
mod identity;
mod inspect;
mod limits;
mod log_file;
mod own_grants;
mod pending;
mod profile;
mod queue;
mod records;
mod release;
mod renew;
mod requests;
mod serve_waiters;
mod session;
mod shared_worker;
mod state_row;
mod statements;
mod store;
mod transaction;
mod unknown;
mod waiters;
mod wake_pipe;
mod wake_thread;
mod worker;

pub use config::Options;
pub use store::SqliteStore;
