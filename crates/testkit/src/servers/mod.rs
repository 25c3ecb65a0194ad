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
//! Another kind of server is one [`Program`]: what to prepare, what to run, and how to tell that it really answers.

mod dir;
mod etcd;
mod port;
mod postgres;
mod process;
mod redis;
mod require;
mod server;
mod zookeeper;

pub use dir::TempDir;
pub use etcd::{EtcdOptions, etcd};
pub use port::Port;
pub use postgres::{PostgresOptions, postgres};
pub use process::Launch;
pub use redis::{AppendOnly, RedisOptions, redis, redis_call, redis_socket};
pub use require::{Skip, demand, require};
pub use rustix::process::Signal;
pub use server::{Place, Program, Server};
pub use zookeeper::{ZooKeeperOptions, zookeeper};
