//! A store to copy. It answers *unsupported* to everything; CONTRIBUTING.md, "A new store in a day", has the steps.
//!
//! In a copy, the first line says where the locks are, how a lease ends, and which clock decides that. Then comes the example that a
//! user pastes:
//!
//! ```
//! use lockkeeper_store_template::{Options, TemplateStore};
//! # fn main() -> lockkeeper_core::Result<()> {
//! let store = TemplateStore::open(Options::from_url("template://127.0.0.1:7000/jobs")?)?;
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs)]

mod acquire;
mod codec;
mod config;
mod connection;
mod error;
mod examine;
mod keys;
mod limits;
mod profile;
mod records;
mod statements;
mod store;

pub use config::Options;
pub use store::TemplateStore;
