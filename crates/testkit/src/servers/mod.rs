//! Real servers for tests, on ports of their own, that end with the test.
//!
//! ```no_run
//! use lockkeeper_testkit::servers::{self, RedisOptions};
//! // Redis is missing: a panic that says what to install. `--without redis`: a loud SKIPPED line.
//! let Ok(mut redis) = servers::redis(RedisOptions::default()) else { return };
//! redis.pause();   // SIGSTOP: it takes connections and does not answer
//! redis.resume();
//! redis.kill9();
//! redis.restart(); // the same port and the same data
//! ```
//!
//! Of Redis there are fleets as well: [`redis_pair`], [`redis_sentinel`] and [`redis_cluster`]; each of their servers can
//! speak TLS ([`TlsFiles`]) and live on a wall clock that the test moves ([`ClockShim`]).
//!
//! Another kind of server is one [`Program`]: what to prepare, what to run, and how to tell that it really answers.

mod clock_shim;
mod cluster;
mod dir;
mod etcd;
mod etcd_cluster;
mod moto;
mod net_namespace;
mod pgbouncer;
mod postgres;
mod process;
mod redis;
mod redis_cluster;
mod redis_keys;
mod redis_pair;
mod redis_sentinel;
mod require;
mod server;
mod tls;
mod wait;
mod zookeeper;
mod zookeeper_cluster;

pub use crate::port::Port;
pub use clock_shim::ClockShim;
pub use cluster::Cluster;
pub use dir::{SERVERS_DIR, TempDir};
pub use etcd::{EtcdOptions, etcd, etcd_get, etcd_tls_addr};
pub use etcd_cluster::{etcd_cluster, etcd_islands};
pub use moto::moto;
pub use net_namespace::{NetNamespace, NetNamespaces};
pub use pgbouncer::pgbouncer;
pub use postgres::{PostgresOptions, postgres, postgres_standby};
pub use process::Launch;
pub use redis::{AppendOnly, RedisOptions, redis, redis_call, redis_socket, redis_tls_addr};
pub use redis_cluster::{
    Migration, RedisCluster, redis_cluster, redis_cluster_with, redis_cluster_with_replicas,
};
pub use redis_keys::RedisKey;
pub use redis_pair::{RedisPair, redis_pair};
pub use redis_sentinel::{RedisSentinel, redis_lone_sentinel, redis_sentinel};
pub use require::{Skip, demand, only_with_full, require};
pub use rustix::process::Signal;
pub use server::{Program, Server, ServerSite};
pub use tls::TlsFiles;
pub use zookeeper::{ZooKeeperOptions, zookeeper, zookeeper_tls_addr, zookeeper_version};
pub use zookeeper_cluster::{zookeeper_cluster, zookeeper_islands};
