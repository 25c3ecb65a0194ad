//! `memory:` — the reference store: the pure lock table behind a mutex. Read it first.
//!
//! It keeps its locks in one process and loses them with it, which makes it right for tests, for one program that wants
//! the same API everywhere, and for learning what a store has to do; and wrong for correctness across processes.
#![deny(missing_docs)]

mod records;
mod store;

pub use store::MemoryStore;
