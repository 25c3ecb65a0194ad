//! The options of the store, and its URL.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result, Secret, StoreUrl};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_store_kit::TlsPaths;

use crate::connection::{ConnectOptions, Endpoint};
use crate::tls::Tls;

/// Which servers there are, and how they belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// One.
    Single(Endpoint),
    /// The one that the sentinels call the master of this name.
    Sentinel {
        /// Where the sentinels are.
        sentinels: Vec<Endpoint>,
        /// Its name at the sentinels.
        name: String,
        /// The user to log in as at the sentinels, which have users of their own.
        user: Option<String>,
        /// The password for the sentinels.
        password: Option<Secret>,
    },
    /// A cluster; these are some of its nodes.
    Cluster(Vec<Endpoint>),
}

/// How to open a store.
///
/// ```
/// # use lockkeeper_redis::{Options, Servers};
/// let options = Options::from_url("redis://:secret@10.0.0.7:6379/2?prefix=jobs:&wait_replicas=1")?;
/// assert_eq!((options.prefix.as_str(), options.wait_replicas), ("jobs:", 1));
/// let options = Options::from_url("redis+sentinel://s1,s2,s3/mymaster")?;
/// assert!(matches!(options.servers, Servers::Sentinel { name, .. } if name == "mymaster"));
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// The servers.
    pub servers: Servers,
    /// User, password, database, TLS and timeout.
    pub access: ConnectOptions,
    /// The text before the name in the key of a lock: `lock:` by default. Other clients of the same locks need the
    /// same.
    pub prefix: String,
    /// How many replicas must have a grant before it counts.
    pub wait_replicas: u32,
    /// How often a process with waiters polls the server: a lost message delays a grant by this much at most.
    pub poll: Duration,
    /// How long a waiter has to confirm a hand-off, and how long the server keeps the queue entries of a silent process.
    pub claim: Duration,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
}

const OPTIONS: [&str; 11] = [
    "db",
    "prefix",
    "wait_replicas",
    "timeout",
    "poll",
    "claim",
    "ca",
    "cert",
    "key",
    "sentinel_user",
    "sentinel_password",
];

impl Options {
    /// The longest claim.
    pub(crate) const CLAIM_MOST: Duration = Duration::from_secs(600);

    /// From an address: `redis://`, `rediss://` (TLS), `redis+unix:///PATH`, `redis+sentinel://HOSTS/MASTER` or
    /// `redis+cluster://HOSTS`; the last two with TLS as `rediss+sentinel://` and `rediss+cluster://`.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut address = StoreUrl::parse(url)?;
        let (encrypted, kind) = match address.scheme.as_str() {
            "redis" | "redis+unix" | "redis+sentinel" | "redis+cluster" => (false, &address.scheme[5..]),
            "rediss" | "rediss+sentinel" | "rediss+cluster" => (true, &address.scheme[6..]),
            other => return Err(Error::invalid(format!("{other}:// is not the address of a Redis store"))),
        };
        let kind = kind.to_owned();
        let mut db = address.option("db");
        let servers = servers(&kind, &mut address, &mut db)?;
        let db = match db {
            None => 0,
            Some(text) => text
                .parse()
                .map_err(|_| Error::invalid("the database is a number: redis://HOST/0 or ?db=0"))?,
        };
        let tls = match TlsPaths::take(&mut address, encrypted, "redis")? {
            Some(paths) => Some(Tls::new(paths.ca.as_deref(), paths.identity())?),
            None => None,
        };
        let timeout = address.duration("timeout")?.unwrap_or(Duration::from_secs(3));
        let access = ConnectOptions {
            user: address.user.clone(),
            password: address.password.clone(),
            db,
            tls,
            timeout,
        };
        let mut options = Options::new(servers, access);
        if let Some(prefix) = address.option("prefix") {
            options.prefix = prefix;
        }
        options.wait_replicas = address.number("wait_replicas")?.unwrap_or(0);
        options.poll = address.duration("poll")?.unwrap_or(options.poll);
        options.claim = address.duration("claim")?.unwrap_or(options.claim);
        address.finish(&OPTIONS)?;
        options.check()?;
        Ok(options)
    }

    /// These servers, and everything else as usual.
    pub fn new(servers: Servers, access: ConnectOptions) -> Self {
        Options {
            servers,
            access,
            prefix: "lock:".into(),
            wait_replicas: 0,
            poll: Duration::from_secs(1),
            claim: Duration::from_secs(5),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        // With a beginning of it as the prefix, a name could complete it and reach the store's own keys.
        let own = "lockkeeper:".starts_with(&self.prefix) || self.prefix.starts_with("lockkeeper:");
        if own || self.prefix.len() > 256 {
            return Err(Error::invalid(format!(
                "the prefix {:?} is not possible: 1 to 256 bytes that neither begin with lockkeeper: nor are its beginning",
                self.prefix
            )));
        }
        if self.poll < Duration::from_millis(50)
            || self.claim < self.poll * 2
            || self.claim > Options::CLAIM_MOST
        {
            return Err(Error::invalid(
                "poll is at least 50ms, and claim at least twice as long as poll and at most 10m",
            ));
        }
        if self.access.timeout < Duration::from_millis(50) {
            return Err(Error::invalid("the timeout is at least 50ms"));
        }
        Ok(())
    }
}

/// The servers of an address of this kind (`""`, `"+unix"`, `"+sentinel"` or `"+cluster"`), with their options. `db` is that of
/// `?db=`, and after the call also that of the path.
fn servers(kind: &str, address: &mut StoreUrl, db: &mut Option<String>) -> Result<Servers> {
    let endpoints = |address: &StoreUrl, port: u16| -> Vec<Endpoint> {
        address.hosts.iter().map(|(host, own)| Endpoint::Tcp(host.clone(), own.unwrap_or(port))).collect()
    };
    let missing = |what: &str| Error::invalid(format!("{what} is missing in the address"));
    let servers = match kind {
        "" if address.hosts.len() == 1 => {
            if !address.path.is_empty() {
                if db.is_some() {
                    return Err(Error::invalid("the database is given twice: in the path and as ?db="));
                }
                *db = Some(address.path.clone());
            }
            Servers::Single(endpoints(address, 6379).remove(0))
        }
        "" if address.hosts.is_empty() => return Err(missing("the host")),
        "" => {
            return Err(Error::invalid(
                "redis:// is one server: several are redis+sentinel://HOSTS/MASTER, redis+cluster://HOSTS, or \
                 redlock://HOSTS",
            ));
        }
        "+unix" if !address.hosts.is_empty() => {
            return Err(Error::invalid("a socket is a file of this machine: redis+unix:///PATH"));
        }
        "+unix" if address.path.is_empty() => return Err(missing("the path of the socket")),
        "+unix" => Servers::Single(Endpoint::Unix(format!("/{}", address.path))),
        _ if address.hosts.is_empty() => return Err(missing("a host")),
        "+sentinel" if address.path.is_empty() => {
            return Err(missing("the name of the master, as redis+sentinel://HOSTS/NAME,"));
        }
        "+sentinel" => Servers::Sentinel {
            sentinels: endpoints(address, 26379),
            name: address.path.clone(),
            user: address.option("sentinel_user"),
            password: address.option("sentinel_password").map(Secret::from),
        },
        _ if address.path.is_empty() && db.is_none() => Servers::Cluster(endpoints(address, 6379)),
        _ => return Err(Error::invalid("a cluster has no databases to choose from")),
    };
    if let Servers::Sentinel { user: Some(_), password: None, .. } = &servers {
        return Err(Error::invalid("?sentinel_user= needs ?sentinel_password="));
    }
    let at_sentinels = ["sentinel_user", "sentinel_password"];
    if kind != "+sentinel" && at_sentinels.iter().any(|key| address.option(key).is_some()) {
        return Err(Error::invalid(
            "?sentinel_user= and ?sentinel_password= are for redis+sentinel://: give others as redis://USER:PASSWORD@HOST",
        ));
    }
    Ok(servers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_address_is_read() {
        let servers = |url: &str| Options::from_url(url).unwrap().servers;
        let tcp = |host: &str, port| Endpoint::Tcp(host.into(), port);
        assert_eq!(servers("redis://h"), Servers::Single(tcp("h", 6379)));
        assert_eq!(
            servers("redis+unix:///run/redis.sock?db=3"),
            Servers::Single(Endpoint::Unix("/run/redis.sock".into()))
        );
        assert_eq!(servers("redis+cluster://a,b:7"), Servers::Cluster(vec![tcp("a", 6379), tcp("b", 7)]));
        assert_eq!(Options::from_url("redis://h/4").unwrap().access.db, 4);
        assert_eq!(Options::from_url("redis+unix:///s?db=3").unwrap().access.db, 3);
        assert!(Options::from_url("rediss://h").unwrap().access.tls.is_some());
    }

    #[test]
    fn half_given_addresses_are_refused() {
        for bad in [
            "redis://",
            "redis://a,b",
            "redis://h/x",
            "redis://h/1?db=1",
            "redis://h?ca=/x",
            "rediss://h?ca=/nowhere",
            "rediss://h?cert=/x",
            "redis+unix://h/x",
            "redis+unix:///",
            "redis+sentinel://h",
            "redis+cluster://h/1",
            "redis://h?prefix=",
            "redis://h?prefix=lockkeeper:x",
            "redis://h?prefix=lockkeeper:",
            "redis://h?prefix=lockkeeper",
            "redis://h?prefix=lock",
            "redis://h?prefix=l",
            "redis://h?poll=1ms",
            "redis://h?poll=10s",
            "redis://h?wait=1",
            "http://h",
        ] {
            assert!(matches!(Options::from_url(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }
}
