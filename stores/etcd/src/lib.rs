//! A store that keeps locks in etcd: by consensus, with a fence (the fencing token) for every grant and a fair queue.
//!
//! A lock uses the keys of `etcdctl lock`, so Lockkeeper and `etcdctl` exclude each other. Every grant is one
//! transaction, and its revision makes the fence. A waiter watches its predecessor only. All locks of a process with the
//! same lease length share one etcd lease. `docs/stores/etcd.md` has the guarantees, `DESIGN.md` the decisions.
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
mod acquire_txn;
mod admission;
mod batch;
mod break_lock;
mod client;
mod codec;
mod config;
mod connection;
mod error;
mod events;
mod examine;
mod fence_base;
mod hold_registry;
mod inspect;
mod key_slots;
mod keys;
mod lease;
mod lease_pool;
mod profile;
mod proto;
mod queue;
mod record_store;
mod release;
mod renew;
mod revoke;
mod statements;
mod store;
mod txn_batch;
mod unknown;
mod waiters;
mod watcher;

pub use config::Options;
pub use store::EtcdStore;
