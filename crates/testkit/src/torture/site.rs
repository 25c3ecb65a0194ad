//! The servers of one cell, and the URL by which each client reaches them: directly, or through proxies of its own.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use lockkeeper_core::faults::{Deployment, FaultKind};

use super::disk::LoopDisk;
use crate::proxy::{Framing, Proxy};
use crate::servers::{
    self, AppendOnly, ClockShim, Cluster, EtcdOptions, PostgresOptions, RedisOptions, RedisPair, Server,
    Skip, TempDir, ZooKeeperOptions, etcd_get, redis_call,
};

/// How many members a cluster has, and how many servers a quorum.
const MEMBERS: usize = 3;
const QUORUM: usize = 5;

/// The servers of a cell.
pub(super) enum SiteServers {
    /// A file, in a directory of its own.
    File(TempDir),
    /// Servers that know nothing of each other: one, or a quorum.
    Alone(Vec<Server>),
    /// A Redis primary and its replica.
    RedisPair(Box<RedisPair>),
    /// A PostgreSQL primary and its standby.
    PostgresPair(Box<[Server; 2]>),
    /// Members that choose a leader.
    Cluster(Cluster),
}

/// The store of one cell.
pub(super) struct TortureSite {
    pub deployment: Deployment,
    pub servers: SiteServers,
    /// For each client, one proxy before each server; none if clients connect directly.
    pub proxies: Vec<Vec<Proxy>>,
    pub clock: Option<ClockShim>,
    pub disk: Option<LoopDisk>,
    pub version: String,
    /// The session of ZooKeeper. A lock ends with its session, whatever its ttl.
    session_seconds: u64,
}

/// Why a cell cannot run here.
#[derive(Debug)]
pub(super) enum SiteFailure {
    /// The tests run without a part, or the test kit has no injection for it.
    NotHere(String),
    /// Something went wrong.
    Broken(io::Error),
}

impl From<Skip> for SiteFailure {
    fn from(skip: Skip) -> Self {
        SiteFailure::NotHere(format!("left out: {skip:?}"))
    }
}

impl From<io::Error> for SiteFailure {
    fn from(error: io::Error) -> Self {
        SiteFailure::Broken(error)
    }
}

impl TortureSite {
    /// Starts what this cell needs, for so many clients.
    pub fn start(
        deployment: Deployment,
        fault: FaultKind,
        clients: usize,
    ) -> Result<TortureSite, SiteFailure> {
        let disk = LoopDisk::wanted(fault).then(LoopDisk::mount).transpose()?;
        if jumps(fault) && deployment == Deployment::EtcdOld {
            return Err(not_here(
                "a Go program reads the clock without the C library, and etcd's leases do not follow the wall clock",
            ));
        }
        let clock = jumps(fault).then(ClockShim::build).transpose()?;
        let servers = start_servers(deployment, fault, clock.as_ref())?;
        let mut site = TortureSite {
            deployment,
            servers,
            proxies: Vec::new(),
            clock,
            disk,
            version: String::new(),
            session_seconds: if fault == FaultKind::SlowNetwork { 10 } else { 2 },
        };
        site.version = site.read_version();
        if proxied(fault) {
            let addrs = site.addrs();
            let framing = framing(deployment);
            let proxies = |_| addrs.iter().map(|addr| Proxy::start(*addr, framing)).collect();
            site.proxies = (0..clients).map(proxies).collect();
        }
        Ok(site)
    }

    /// The addresses of the servers that clients connect to.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        match &self.servers {
            SiteServers::File(_) => Vec::new(),
            SiteServers::Alone(servers) => servers.iter().map(Server::addr).collect(),
            SiteServers::RedisPair(pair) => vec![pair.primary().addr()],
            SiteServers::PostgresPair(pair) => vec![pair[0].addr()],
            SiteServers::Cluster(cluster) => cluster.nodes().iter().map(Server::addr).collect(),
        }
    }

    /// The URL for this client; `None`: for the runner, which no fault of a proxy touches.
    pub fn url(&self, client: Option<usize>) -> String {
        let proxies = client.and_then(|client| self.proxies.get(client % self.proxies.len().max(1)));
        let addrs = match (proxies, &self.servers) {
            (Some(proxies), _) => proxies.iter().map(Proxy::addr).collect(),
            // After a fail-over the primary is another one: the runner goes where the clients go.
            (None, SiteServers::RedisPair(_) | SiteServers::PostgresPair(_)) => self
                .proxies
                .first()
                .map_or_else(|| self.addrs(), |proxies| proxies.iter().map(Proxy::addr).collect()),
            (None, _) => self.addrs(),
        };
        let hosts: Vec<String> = addrs.iter().map(SocketAddr::to_string).collect();
        let hosts = hosts.join(",");
        match &self.servers {
            SiteServers::File(dir) => format!("sqlite:{}", self.database(dir)),
            _ => match self.deployment {
                Deployment::Redlock => {
                    format!("redlock://{hosts}?max_ttl=10s&young_node=10s&poll=300ms&node_timeout=1s")
                }
                Deployment::Etcd | Deployment::EtcdOld => {
                    format!("etcd://{hosts}?timeout=1s&poll=1s&claim=2s")
                }
                Deployment::ZooKeeper | Deployment::ZooKeeperOld => {
                    format!(
                        "zk://{hosts}/locks?create=yes&timeout=1s&poll=1s&session={}s",
                        self.session_seconds
                    )
                }
                Deployment::DynamoDb | Deployment::DynamoDbGlobal => {
                    format!(
                        "dynamodb://test:secret@eu-central-1/locks?endpoint=http://{hosts}&timeout=3s&poll=200ms"
                    )
                }
                Deployment::Postgres
                | Deployment::PostgresUnsynced
                | Deployment::PostgresNoFsync
                | Deployment::PostgresStandby => {
                    format!("postgres://postgres@{hosts}/postgres?timeout=1s&poll=500ms&claim=2s")
                }
                _ => format!("redis://{hosts}?timeout=1s&poll=500ms&claim=2s"),
            },
        }
    }

    fn database(&self, dir: &TempDir) -> String {
        let at = self.disk.as_ref().map_or_else(|| dir.path(), LoopDisk::path);
        at.join("locks.db").display().to_string()
    }

    /// The files on which a process that is stopped must hold no lock.
    pub fn database_files(&self) -> Vec<std::path::PathBuf> {
        match &self.servers {
            SiteServers::File(dir) => crate::stop::files_with_locks(self.database(dir).as_ref()),
            _ => Vec::new(),
        }
    }

    fn read_version(&self) -> String {
        let first = |text: &str, key: &str| {
            text.lines().find_map(|line| line.strip_prefix(key)).map(|rest| rest.trim().to_owned())
        };
        let Some(addr) = self.addrs().first().copied() else { return "SQLite (bundled)".to_owned() };
        let found = match self.deployment {
            Deployment::Postgres
            | Deployment::PostgresUnsynced
            | Deployment::PostgresNoFsync
            | Deployment::PostgresStandby => postgres_version(),
            Deployment::Etcd | Deployment::EtcdOld => etcd_get(addr, "/version").ok().and_then(|text| {
                let version = text.split("\"etcdserver\":\"").nth(1)?.split('"').next()?;
                Some(format!("etcd {version}"))
            }),
            Deployment::ZooKeeper | Deployment::ZooKeeperOld => {
                servers::zookeeper_version(addr).ok().map(|version| format!("ZooKeeper {version}"))
            }
            Deployment::DynamoDb | Deployment::DynamoDbGlobal => Some("moto 5.2.5".to_owned()),
            _ => redis_call(addr, &["INFO", "server"])
                .ok()
                .and_then(|info| first(&info, "redis_version:"))
                .map(|version| format!("Redis {version}")),
        };
        found.unwrap_or_else(|| "version unknown".to_owned())
    }
}

fn postgres_version() -> Option<String> {
    let version = std::process::Command::new("psql").arg("--version").output().ok()?;
    let text = String::from_utf8(version.stdout).ok()?;
    let number = text.split_whitespace().nth(2)?.to_owned();
    Some(format!("PostgreSQL {number}"))
}

/// Whether the wall clock of the servers is moved.
fn jumps(fault: FaultKind) -> bool {
    matches!(fault, FaultKind::StoreClockForward | FaultKind::StoreClockBack)
}

/// Whether clients connect through proxies.
fn proxied(fault: FaultKind) -> bool {
    matches!(
        fault,
        FaultKind::HolderCutOff
            | FaultKind::OneWayCut
            | FaultKind::SlowNetwork
            | FaultKind::FailOver
            | FaultKind::ReplyLost
            | FaultKind::LateReplies
    )
}

fn framing(deployment: Deployment) -> Framing {
    match deployment {
        Deployment::Postgres
        | Deployment::PostgresUnsynced
        | Deployment::PostgresNoFsync
        | Deployment::PostgresStandby => Framing::Postgres,
        Deployment::Etcd | Deployment::EtcdOld => Framing::Http2,
        Deployment::ZooKeeper | Deployment::ZooKeeperOld => Framing::ZooKeeper,
        Deployment::DynamoDb | Deployment::DynamoDbGlobal => Framing::Http1,
        _ => Framing::Resp,
    }
}

fn start_servers(
    deployment: Deployment,
    fault: FaultKind,
    clock: Option<&ClockShim>,
) -> Result<SiteServers, SiteFailure> {
    let clustered = matches!(fault, FaultKind::FailOver | FaultKind::SlowDisk);
    let redis = |append_only| RedisOptions { append_only, clock: clock.cloned(), ..RedisOptions::default() };
    let postgres = |settings: &[(&str, &str)]| {
        let settings = settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        PostgresOptions { settings, clock: clock.cloned(), ..PostgresOptions::default() }
    };
    let alone = |server: Server| SiteServers::Alone(vec![server]);
    Ok(match deployment {
        Deployment::Sqlite | Deployment::SqliteVolatile => SiteServers::File(TempDir::new("torture")),
        Deployment::RedisAlways => alone(servers::redis(redis(AppendOnly::Always))?),
        Deployment::RedisEverySecond => alone(servers::redis(redis(AppendOnly::EverySecond))?),
        Deployment::RedisVolatile => alone(servers::redis(redis(AppendOnly::Off))?),
        Deployment::RedisReplicated => {
            SiteServers::RedisPair(Box::new(servers::redis_pair(redis(AppendOnly::Always))?))
        }
        Deployment::Redlock => {
            let start = |_| servers::redis(redis(AppendOnly::Off));
            SiteServers::Alone((0..QUORUM).map(start).collect::<Result<_, Skip>>()?)
        }
        Deployment::Postgres => alone(servers::postgres(postgres(&[]))?),
        // The longest delay shows the loss soonest.
        Deployment::PostgresUnsynced => {
            let settings = [("synchronous_commit", "off"), ("wal_writer_delay", "10s")];
            alone(servers::postgres(postgres(&settings))?)
        }
        Deployment::PostgresNoFsync => alone(servers::postgres(postgres(&[("fsync", "off")]))?),
        Deployment::PostgresStandby => {
            let primary = servers::postgres(postgres(&[]))?;
            let standby = servers::postgres_standby(&primary, postgres(&[]))?;
            SiteServers::PostgresPair(Box::new([primary, standby]))
        }
        Deployment::Etcd => {
            return Err(not_here("the etcd here is older than 3.4.31: it runs as the other column"));
        }
        Deployment::EtcdOld if clustered => {
            SiteServers::Cluster(servers::etcd_cluster(MEMBERS, EtcdOptions::default())?)
        }
        Deployment::EtcdOld => alone(servers::etcd(EtcdOptions::default())?),
        Deployment::ZooKeeper if fault == FaultKind::FailOver => {
            return Err(not_here(
                "the ZooKeeper here is older than 3.9.4: its ensembles are the other column",
            ));
        }
        Deployment::ZooKeeper | Deployment::ZooKeeperOld => {
            let mut options = ZooKeeperOptions { clock: clock.cloned(), ..ZooKeeperOptions::default() };
            if fault == FaultKind::SlowNetwork {
                // A session has at most 20 ticks.
                options.tick = Duration::from_secs(1);
            }
            if deployment == Deployment::ZooKeeperOld {
                SiteServers::Cluster(servers::zookeeper_cluster(MEMBERS, options)?)
            } else {
                alone(servers::zookeeper(options)?)
            }
        }
        Deployment::DynamoDb if cfg!(feature = "dynamodb") => alone(servers::moto()?),
        Deployment::DynamoDb => return Err(not_here("the test kit was built without its feature dynamodb")),
        Deployment::Memory => return Err(not_here("the laws run it in one process, on a virtual clock")),
        Deployment::SqliteNetwork => return Err(not_here("no network file system can be mounted here")),
        Deployment::RedisEvicting => return Err(not_here("the runner does not fill a server yet")),
        Deployment::DynamoDbGlobal => return Err(not_here("moto has one region")),
    })
}

pub(super) fn not_here(why: &str) -> SiteFailure {
    SiteFailure::NotHere(why.to_owned())
}

/// How long the runner waits for something that a healthy machine does in seconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(90);
