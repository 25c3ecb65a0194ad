//! Locks in ZooKeeper, for correctness: kept by consensus, with fences (fencing tokens), in the order of arrival.
//!
//! A lock's nodes are those of Curator's `InterProcessMutex`, so Curator's clients and this store exclude each other.
//! Every grant is a write that a majority of the servers has accepted, and the zxid of that write makes the fence. A
//! waiter watches only the entry ahead of it. One session holds all locks of a process. `docs/stores/zookeeper.md`
//! lists the guarantees and their limits; `DESIGN.md` has the decisions behind them.
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
mod acquire_txn;
mod admission;
mod batch;
mod break_lock;
mod catch_up;
mod client;
mod codec;
mod config;
mod connection;
mod diagnose;
mod error;
mod event_log;
mod events;
mod examine;
mod fence_base;
mod four_letter;
mod hold_back;
mod hold_registry;
mod inspect;
mod keys;
mod profile;
mod queue;
mod read_queue;
mod record_chunks;
mod record_expiry;
mod record_store;
mod release;
mod renew;
mod request_barrier;
mod revoke;
mod server_version;
mod session;
mod statements;
mod store;
mod sweep;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
mod tls;
mod unknown;
mod waiters;

pub use config::Options;
pub use store::ZooKeeperStore;
pub use tls::ZooKeeperTls;
