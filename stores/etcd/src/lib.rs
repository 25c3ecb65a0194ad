//! Locks in etcd, for when it must be right: kept by consensus, fenced, first come, first served.
//!
//! A lock's keys are those of `etcdctl lock`, so that both keep each other out. Every grant is one transaction, whose
//! revision makes the fence; waiters watch the one before them and nobody else; one lease per process and length holds
//! all of its locks. What is promised, and what is not, is in `docs/stores/etcd.md`.
//!
//! ```no_run
//! # async fn example() -> lockkeeper_core::Result<()> {
//! use lockkeeper_etcd::{EtcdStore, Options};
//! let store = EtcdStore::open(Options::from_url("etcd://10.0.0.7,10.0.0.8,10.0.0.9/jobs")?).await?;
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs)]

mod acquire;
mod base;
mod book;
mod breaking;
mod config;
mod entry;
mod fault;
mod grant;
mod hold;
mod judge;
mod lane;
mod layout;
mod lease;
mod link;
mod open;
mod order;
mod proto;
mod records;
mod revoke;
mod script;
mod seat;
mod spy;
mod store;
mod turns;
mod view;
mod wait;
mod watch;

pub use config::Options;
pub use store::EtcdStore;
