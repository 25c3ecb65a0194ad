//! Resources that check the fence (the fencing token) of every write, and refuse a late writer.
//!
//! A lock is only as strong as the resource that checks its fence. Each adapter keeps a **mark** for each
//! resource: the highest fence that it has accepted. It refuses a write with a lower fence with
//! [`Error::Stale`] and changes nothing; it accepts one with the same fence or a higher one, and raises the
//! mark in the same step. So the rule survives a paused process, a late packet, a clock that jumps, and a
//! store that granted the lock to another client.
//!
//! Deleting is a write like any other: the mark stays, because a resource that forgets it takes a late writer for a new one.
//!
//! Every adapter counts the writes that it refuses in `lockkeeper_fenced_stale_writes_total`, with the label `adapter`, for the recorder
//! of the crate [`metrics`](https://docs.rs/metrics) that the program has installed.
//!
//! # Which adapter do I need?
//! | the resource | module | feature |
//! |---|---|---|
//! | [PostgreSQL, in your own transaction, or a table that checks by itself](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/postgres.md) | `postgres` | `postgres` |
//! | [SQLite, in your own transaction](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/sqlite.md) | `sqlite` | `sqlite` |
//! | [Redis: SET, HSET and DEL](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/redis.md) | `redis` | `redis` |
//! | [DynamoDB: a condition in your own writes](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/dynamodb.md) | `dynamodb` | `dynamodb` |
//! | [plain files](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/file.md) | `file` | `file` |
//! | [objects of S3, Google Cloud Storage, Azure and others](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/object-store.md) | `object` | `object-store` |
//! | [an HTTP service, as a layer](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/http.md) | `http` | `http` |
//! | any SQL client, such as sqlx: the statement as text | [`sql`] | none |
//! | [an HTTP service that cannot be changed](https://github.com/lockkeeper/lockkeeper/blob/main/docs/fenced/http.md) | the command `lockkeeper gate` | |
//! | a resource of your own | [`Fenced`], and the laws of `lockkeeper-testkit` | none |

#[cfg(feature = "dynamodb")]
pub mod dynamodb;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "object-store")]
pub mod object;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
pub mod sql;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod stale_counter;

// The parameters and the answers of the adapters: the same types as `lockkeeper::Error` and `lockkeeper::Fence`.
pub use lockkeeper_core::{Error, Fence, Result};

use async_trait::async_trait;
use stale_counter::count_verdict;

/// A value that is guarded, and the fence it was last written with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuardedValue {
    /// The mark: the highest fence that was taken.
    pub fence: Fence,
    /// The value; `None` if the last write deleted it.
    pub value: Option<Vec<u8>>,
}

/// The operations of every adapter, on any resource. One suite of laws holds all of them to it.
///
/// The same write sent twice (a retry after [`Error::Unknown`]) does no harm: its fence is not lower than itself.
#[async_trait]
pub trait Fenced: Send + Sync {
    /// Writes a value. [`Error::Stale`] if a higher fence was seen: then nothing has changed.
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()>;

    /// Deletes the value and keeps the mark. [`Error::Stale`] as with [`Fenced::put`]; deleting nothing is no error.
    async fn delete(&self, resource: &str, fence: Fence) -> Result<()>;

    /// The mark and the value. `None`: no writer has written here.
    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>>;
}

/// The verdict on a presented fence, by the mark that the resource answered with.
pub(crate) fn verdict(adapter: &'static str, presented: Fence, mark: Fence) -> Result<()> {
    let is_stale = presented < mark;
    count_verdict(adapter, if is_stale { Err(Error::Stale { presented, seen: mark }) } else { Ok(()) })
}

/// The mark that a resource stores. A number that is no fence was written by another program, and no write
/// is accepted because of it.
pub(crate) fn fence(mark: i64) -> Result<Fence> {
    let number = u64::try_from(mark).unwrap_or(0);
    Fence::new(number).map_err(|e| lockkeeper_core::Error::invalid(format!("the mark is damaged: {e}")))
}

/// The pages of the adapters, and the guides that use them: what they show is compiled and run.
#[cfg(doctest)]
mod pages {
    #[cfg(feature = "dynamodb")]
    #[doc = include_str!("../../../docs/fenced/dynamodb.md")]
    struct DynamoDb;

    #[cfg(feature = "file")]
    #[doc = include_str!("../../../docs/fenced/file.md")]
    struct File;

    #[cfg(feature = "http")]
    #[doc = include_str!("../../../docs/fenced/http.md")]
    struct Http;

    #[cfg(feature = "object-store")]
    #[doc = include_str!("../../../docs/fenced/object-store.md")]
    struct ObjectStore;

    #[cfg(feature = "postgres")]
    #[doc = include_str!("../../../docs/fenced/postgres.md")]
    struct Postgres;

    #[doc = include_str!("../../../docs/guide/rust-service.md")]
    struct RustService;

    #[doc = include_str!("../../../docs/guide/testing-your-code.md")]
    struct TestingYourCode;

    #[cfg(feature = "redis")]
    #[doc = include_str!("../../../docs/fenced/redis.md")]
    struct Redis;

    #[cfg(feature = "sqlite")]
    #[doc = include_str!("../../../docs/fenced/sqlite.md")]
    struct Sqlite;
}
