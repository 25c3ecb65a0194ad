//! The columns of the table: a store, and the settings of its servers that decide what it keeps.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{FaultCell, FaultKind, table};

/// A store as it is deployed: one column of the table of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Deployment {
    /// In the memory of one process.
    Memory,
    /// SQLite on a file system that keeps what was synced.
    Sqlite,
    /// SQLite on a file system that may lose what was synced.
    SqliteVolatile,
    /// SQLite on a network file system.
    SqliteNetwork,
    /// PostgreSQL that syncs every commit, alone or with a synchronous standby.
    Postgres,
    /// PostgreSQL with `synchronous_commit` off.
    PostgresUnsynced,
    /// PostgreSQL with `fsync` off.
    PostgresNoFsync,
    /// PostgreSQL with a standby that may lack the last commits.
    PostgresStandby,
    /// One Redis server with `appendfsync always`.
    RedisAlways,
    /// One Redis server with `appendfsync everysec`.
    RedisEverySecond,
    /// One Redis server without an append-only file.
    RedisVolatile,
    /// Redis with replicas, Sentinel or Cluster.
    RedisReplicated,
    /// A Redis server that evicts keys.
    RedisEvicting,
    /// A quorum of independent Redis servers.
    Redlock,
    /// etcd 3.4.31, 3.5.13 or newer.
    Etcd,
    /// An etcd that may end the leases of live holders (etcd issue 15247).
    EtcdOld,
    /// One ZooKeeper server, or an ensemble of 3.9.4 or newer.
    ZooKeeper,
    /// An ensemble of ZooKeeper before 3.9.4 (ZOOKEEPER-4643, 4785).
    ZooKeeperOld,
    /// A DynamoDB table in one region.
    DynamoDb,
    /// A global table of DynamoDB.
    DynamoDbGlobal,
}

impl Deployment {
    /// All columns.
    pub const ALL: [Deployment; 20] = {
        use Deployment::*;
        [
            Memory,
            Sqlite,
            SqliteVolatile,
            SqliteNetwork,
            Postgres,
            PostgresUnsynced,
            PostgresNoFsync,
            PostgresStandby,
            RedisAlways,
            RedisEverySecond,
            RedisVolatile,
            RedisReplicated,
            RedisEvicting,
            Redlock,
            Etcd,
            EtcdOld,
            ZooKeeper,
            ZooKeeperOld,
            DynamoDb,
            DynamoDbGlobal,
        ]
    };

    /// The name of the column, as flags and reports have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Deployment::Memory => "memory",
            Deployment::Sqlite => "sqlite",
            Deployment::SqliteVolatile => "sqlite-volatile",
            Deployment::SqliteNetwork => "sqlite-network",
            Deployment::Postgres => "postgres",
            Deployment::PostgresUnsynced => "postgres-unsynced",
            Deployment::PostgresNoFsync => "postgres-no-fsync",
            Deployment::PostgresStandby => "postgres-standby",
            Deployment::RedisAlways => "redis-always",
            Deployment::RedisEverySecond => "redis-everysec",
            Deployment::RedisVolatile => "redis-volatile",
            Deployment::RedisReplicated => "redis-replicated",
            Deployment::RedisEvicting => "redis-evicting",
            Deployment::Redlock => "redlock",
            Deployment::Etcd => "etcd",
            Deployment::EtcdOld => "etcd-old",
            Deployment::ZooKeeper => "zookeeper",
            Deployment::ZooKeeperOld => "zookeeper-old",
            Deployment::DynamoDb => "dynamodb",
            Deployment::DynamoDbGlobal => "dynamodb-global",
        }
    }

    /// The cell of this column in the row of `fault`.
    pub fn cell(self, fault: FaultKind) -> FaultCell {
        table::cell(self, fault)
    }

    /// The column of the same store as it should be deployed, if this is another one.
    pub fn main_column(self) -> Option<Deployment> {
        match self {
            Deployment::SqliteVolatile | Deployment::SqliteNetwork => Some(Deployment::Sqlite),
            Deployment::PostgresUnsynced | Deployment::PostgresNoFsync | Deployment::PostgresStandby => {
                Some(Deployment::Postgres)
            }
            Deployment::RedisEverySecond
            | Deployment::RedisVolatile
            | Deployment::RedisReplicated
            | Deployment::RedisEvicting => Some(Deployment::RedisAlways),
            Deployment::EtcdOld => Some(Deployment::Etcd),
            Deployment::ZooKeeperOld => Some(Deployment::ZooKeeper),
            Deployment::DynamoDbGlobal => Some(Deployment::DynamoDb),
            _ => None,
        }
    }

    /// The longest time for which the store keeps a lease of this ttl that no holder renews. etcd counts whole seconds, and adds an
    /// eighth of the ttl for renewals of many locks by one lease.
    pub fn longest_lease(self, ttl: Duration) -> Duration {
        match self {
            Deployment::Etcd | Deployment::EtcdOld => ttl * 9 / 8 + Duration::from_secs(1),
            _ => ttl,
        }
    }
}
