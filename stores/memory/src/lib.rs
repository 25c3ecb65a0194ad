//! `memory:` — the reference store: the pure lock table behind a mutex. Read it first.
//!
//! The locks belong to one process and are lost with it. The fence (the fencing token) grows for as long as the process lives.
//! The store is for tests, for a program that wants the same API everywhere, and for learning what a store does. It is not for correctness across processes.
#![deny(missing_docs)]

mod bucket_table;
mod examine;
mod limits;
mod record_index;
mod records;
mod store;

pub use store::MemoryStore;
