//! Locks in ZooKeeper, for when it must be right: kept by consensus, fenced, first come, first served.
//!
//! A lock's nodes are those of Curator's `InterProcessMutex`, so that both keep each other out. Every grant is a write that
//! a majority has taken, and its zxid makes the fence; waiters watch the one before them and nobody else; one session
//! holds all locks of a process. What is promised, and what is not, is in `docs/stores/zookeeper.md`.
//!
//! ```no_run
//! # async fn example() -> lockkeeper_core::Result<()> {
//! use lockkeeper_zookeeper::{Options, ZooKeeperStore};
//! let store = ZooKeeperStore::open(Options::from_url("zk://10.0.0.7,10.0.0.8,10.0.0.9/jobs")?).await?;
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs)]

mod acquire;
mod back;
mod base;
mod book;
mod breaking;
mod config;
mod entry;
mod fading;
mod fault;
mod gate;
mod grant;
mod hold;
mod judge;
mod lane;
mod layout;
mod line;
mod link;
mod look;
mod open;
mod parts;
mod records;
mod refusal;
mod renew;
mod revoke;
mod script;
mod store;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
mod tls;
mod version;
mod view;
mod wait;
mod watch;
mod word;

pub use config::Options;
pub use store::ZooKeeperStore;
pub use tls::Tls;
