//! Lockkeeper is a distributed lock manager: one API over eight stores. Every grant has a [`Fence`] (a fencing token), with
//! which a resource can refuse the writes of a holder that is too late.
//!
//! ```
//! # async fn settle(_: lockkeeper::Fence) {}
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! use lockkeeper::Lockkeeper;
//! use std::time::Duration;
//!
//! let keeper = Lockkeeper::open("memory:").await?;     // or sqlite:PATH, for all processes of a host
//! let guard = keeper
//!     .lock("settlement/2026-06-11")
//!     .ttl(Duration::from_secs(30))                    // others wait this long for a holder that is silent
//!     .wait(Duration::from_secs(5))                    // then Error::Busy, which names the holder
//!     .acquire()
//!     .await?;
//! guard.run(settle(guard.fence())).await?;             // dropped before the deadline if the lock is lost
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Which do I need?
//! | I want to | use |
//! |---|---|
//! | let one process at a time do something | [`Lockkeeper::lock`], which returns a [`Guard`] |
//! | hold several locks at once | [`Lockkeeper::lock_all`] |
//! | allow N holders; let many read or one write | [`Lockkeeper::semaphore`], [`Lockkeeper::rw_lock`] in [`shapes`] |
//! | do something once per key, and keep its result | [`once`] |
//! | keep a value for a while, and have one caller compute it | [`cached`] |
//! | have one leader among many processes | [`election`] |
//! | run a job once per day or hour on many hosts | [`windows`], or the command `lockkeeper cron` |
//! | change a shared value without a lock | [`register`] |
//! | share a list of items among workers, without a lock per item | [`claim`] |
//! | split work among many processes, without a lock per item | [`partitions`] |
//! | limit how often all processes together do something | [`limit`] |
//! | let a resource ask whether a grant still holds | [`Sequencer`] |
//! | see how long requests wait and locks are held | [`metrics`] |
//! | have a resource refuse late writes | an adapter of the crate [`lockkeeper-fenced`](https://docs.rs/lockkeeper-fenced), in the table below |
#![cfg_attr(
    feature = "tower",
    doc = "| honour `Idempotency-Key` in an HTTP service | [`idempotency`], with the feature `tower` |\n| refuse HTTP requests above a rate | [`rate_limit`], with the feature `tower` |"
)]
#![cfg_attr(
    not(feature = "tower"),
    doc = "| honour `Idempotency-Key` in an HTTP service | the module `idempotency`, with the feature `tower` |\n| refuse HTTP requests above a rate | the module `rate_limit`, with the feature `tower` |"
)]
#![cfg_attr(
    feature = "postgres",
    doc = "| share the rows of a PostgreSQL job table among workers | [`jobs`], with the feature `postgres` |"
)]
#![cfg_attr(
    not(feature = "postgres"),
    doc = "| share the rows of a PostgreSQL job table among workers | the module `jobs`, with the feature `postgres` |"
)]
#![cfg_attr(
    feature = "postgres",
    doc = "| lock inside my own PostgreSQL transaction | [`postgres`], with the feature `postgres` |"
)]
#![cfg_attr(
    not(feature = "postgres"),
    doc = "| lock inside my own PostgreSQL transaction | the module `postgres`, with the feature `postgres` |"
)]
//! | test code that uses locks: loss, pause and expiry in milliseconds | `SimulatedKeeper` of the crate [`lockkeeper-testkit`](https://docs.rs/lockkeeper-testkit) |
//! | write a store of my own | [`store`], and the laws of [`lockkeeper-testkit`](https://docs.rs/lockkeeper-testkit) |
//!
//! | store | URL | feature |
//! |---|---|---|
//! | [one process](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/memory.md) | `memory:` | `memory` (default) |
//! | [all processes of a host](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/sqlite.md) | `sqlite:PATH` | `sqlite` (default) |
//! | [PostgreSQL](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/postgres.md) | `postgres://HOST/DATABASE` | `postgres` |
//! | [Redis, Sentinel, Cluster](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/redis.md) | `redis://HOST`, `redis+sentinel://`, `redis+cluster://` | `redis` |
//! | [a quorum of Redis servers](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/redlock.md) | `redlock://HOST,HOST,HOST` | `redlock` |
//! | [etcd](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/etcd.md) | `etcd://HOST,HOST,HOST` | `etcd` |
//! | [ZooKeeper](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/zookeeper.md) | `zk://HOST,HOST,HOST` | `zookeeper`, `zookeeper-tls` |
//! | [DynamoDB](https://github.com/lockkeeper/lockkeeper/blob/main/docs/stores/dynamodb.md) | `dynamodb://REGION/TABLE` | `dynamodb` |
//!
//! | a resource that refuses late writes | adapter in [`lockkeeper-fenced`](https://docs.rs/lockkeeper-fenced) |
//! |---|---|
//! | [PostgreSQL, in your own transaction, or a table that checks by itself](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/postgres.md) | `postgres`, with the feature `postgres` |
//! | [SQLite, in your own transaction](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/sqlite.md) | `sqlite`, with the feature `sqlite` |
//! | [Redis: SET, HSET and DEL](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/redis.md) | `redis`, with the feature `redis` |
//! | [DynamoDB: a condition in your own writes](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/dynamodb.md) | `dynamodb`, with the feature `dynamodb` |
//! | [plain files](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/file.md) | `file`, with the feature `file` |
//! | [objects of S3, Google Cloud Storage, Azure and others](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/object-store.md) | `object`, with the feature `object-store` |
//! | [an HTTP service, as a layer](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/http.md) | `http`, with the feature `http` |
//! | any SQL client, such as sqlx | `sql` |
//! | [an HTTP service that cannot be changed](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/http.md) | the command `lockkeeper gate`, in front of it |
//!
//! **First decide what the lock is for.** If doing the work twice is a waste, every store will do. If it is harm, call
//! [`LockBuilder::for_correctness`] and let the resource check the fence: no store can stop a process that was paused and
//! continues in the belief that it holds the lock. A resource that remembers the highest fence and refuses lower ones can.
//!
//! **Often the best lock is none**: an idempotent operation, a compare-and-swap, a unique key.
//!
//! # What a guard guarantees
//! - [`Guard::is_held`] compares the time with a deadline that is counted from the moment at which the request was *sent*,
//!   on a clock that goes on during suspend. It needs no IO and is right even in the first instruction after a pause.
//! - One thread of the keeper renews all guards in batches, so a busy runtime does not lose locks.
//! - Every future here may be dropped at any await point; the keeper releases in the background what it had requested.
//! - Dropping a [`Guard`] ends the hold at once and releases the lock in the background; if that fails, the ttl ends it.
#![deny(missing_docs)]

mod background_releases;
mod builder;
mod guard;
#[cfg(feature = "tower")]
pub mod idempotency;
#[cfg(feature = "postgres")]
pub mod jobs;
mod keeper;
pub mod metrics;
mod open;
mod own_process;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "tower")]
pub mod rate_limit;
mod recipes;
mod renewal;
mod sequencer;
pub mod shapes;
pub mod store;

pub use builder::LockBuilder;
pub use guard::Guard;
pub use keeper::Lockkeeper;
pub use lockkeeper_core::lease::{LeaseState, LossReason};
pub use lockkeeper_core::{
    Attempt, BootInstant, Busy, Error, Event, EventKind, EventStream, Fence, Finding, Guarantee, Holder,
    HolderView, LimitSupport, Limits, LockName, LockPage, LockView, Locks, Mode, Outcome, Owner, Page,
    Profile, Promise, Purpose, Records, ReleaseOutcome, Result, SettingChange, Severity, Store, WaitOrder,
    WaiterView, WallTime, limits,
};
pub use lockkeeper_host::{Clock, SystemClock};
pub use open::{Init, default_url, init, schemes};
pub use recipes::{KEY_BYTES, cached, claim, election, limit, once, partitions, register, windows};
pub use sequencer::Sequencer;

/// Compiles and runs the Rust of the README.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../../../README.md")]
mod readme {}

/// Compiles and runs the Rust of the guides and of the pages of the recipes.
#[cfg(all(doctest, feature = "memory"))]
mod pages {
    #[doc = include_str!("../../../docs/guide/choosing.md")]
    mod choosing {}
    #[doc = include_str!("../../../docs/guide/choosing-a-store.md")]
    mod choosing_a_store {}
    #[doc = include_str!("../../../docs/claim.md")]
    mod claim {}
    #[cfg(feature = "redis")]
    #[doc = include_str!("../../../docs/cached.md")]
    mod cached {}
    #[doc = include_str!("../../../docs/cron.md")]
    mod cron {}
    #[doc = include_str!("../../../docs/election.md")]
    mod election {}
    #[cfg(feature = "postgres")]
    #[doc = include_str!("../../../docs/jobs.md")]
    mod jobs {}
    #[doc = include_str!("../../../docs/limit.md")]
    mod limit {}
    #[cfg(feature = "tower")]
    #[doc = include_str!("../../../docs/once.md")]
    mod once {}
    #[doc = include_str!("../../../docs/partitions.md")]
    mod partitions {}
    #[doc = include_str!("../../../docs/register.md")]
    mod register {}
    #[doc = include_str!("../../../docs/fenced/sequencer.md")]
    mod sequencer {}
    #[doc = include_str!("../../../docs/shapes.md")]
    mod shapes {}
}
