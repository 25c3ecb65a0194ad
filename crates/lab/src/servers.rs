//! The stores at hand: the servers that are installed, each started for one run.

use lockkeeper_testkit::servers::{
    self, EtcdOptions, PostgresOptions, RedisOptions, Server, Skip, ZooKeeperOptions,
};

use crate::lab::LabError;
use crate::needs::{Need, has_program};

impl From<Skip> for LabError {
    fn from(skip: Skip) -> Self {
        LabError::Broken(skip.text().to_owned())
    }
}

/// A server that runs as a store, with the URL of it.
#[derive(Debug)]
pub struct StoreServer {
    /// The name of the store.
    pub name: &'static str,
    /// Its URL.
    pub url: String,
    /// The server ends with this value.
    _server: Server,
}

/// Starts a Redis server.
///
/// # Errors
/// If the environment asks to go without it.
pub fn redis() -> Result<StoreServer, LabError> {
    let server = servers::redis(RedisOptions::default())?;
    Ok(StoreServer { name: "redis", url: format!("redis://{}", server.addr()), _server: server })
}

/// Starts one server of each kind of store that is installed and that this program can open.
///
/// # Errors
/// If the environment asks to go without one.
pub fn at_hand() -> Result<Vec<StoreServer>, LabError> {
    let mut found = Vec::new();
    let opens = |scheme: &str| lockkeeper::schemes().contains(&scheme);
    if opens("redis") && Need::Redis.is_installed() {
        found.push(redis()?);
    }
    if opens("etcd") && has_program("etcd") {
        let server = servers::etcd(EtcdOptions::default())?;
        found.push(StoreServer { name: "etcd", url: format!("etcd://{}", server.addr()), _server: server });
    }
    if opens("zk") && Need::ZooKeeper.is_installed() {
        let server = servers::zookeeper(ZooKeeperOptions::default())?;
        found.push(StoreServer {
            name: "zookeeper",
            url: format!("zk://{}", server.addr()),
            _server: server,
        });
    }
    if opens("postgres") && std::fs::exists("/usr/lib/postgresql").unwrap_or(false) {
        let server = servers::postgres(PostgresOptions::default())?;
        let url = format!("postgres://postgres@{}/postgres", server.addr());
        found.push(StoreServer { name: "postgres", url, _server: server });
    }
    Ok(found)
}
