//! The `redis://` store: locks in one Redis server, behind Sentinel or in a Cluster.
//!
//! Every step of a lock is one Lua script and one round trip. Every grant has a fence (the fencing token), waiters stand in a
//! queue on the server, and the lock key is the plain one that other Redis lock clients use, so all clients exclude each other.
//!
//! `docs/stores/redis.md` says what the store promises. The [profile](lockkeeper_core::Profile) of an open store says what
//! holds for its servers, because that depends on their settings. `DESIGN.md` has the decisions.
#![deny(missing_docs)]

mod acquire;
mod batch;
mod break_lock;
mod buckets;
mod codec;
mod config;
mod connection;
mod error;
mod events;
mod examine;
mod fenced_values;
mod inspect;
mod keys;
mod limits;
mod multi_slot;
mod profile;
mod records;
mod release;
mod renew;
mod revoke;
mod router;
mod runner;
mod sentinel;
mod slot_migration;
mod statements;
mod store;
mod tls;
mod topology;
mod unknown;
mod waiters;

pub use config::{Options, Servers};
pub use connection::{
    ConnectHandshake, ConnectOptions, Connection, Endpoint, HandshakeHandler, Listener, PushEvent,
};
pub use error::Failure;
pub use examine::{info_findings, read_info, read_time, server_report, silent_server};
pub use fenced_values::FencedValues;
pub use store::RedisStore;
pub use tls::Tls;
