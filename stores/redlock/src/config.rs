//! The options of the store, and its URL.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::vote::majority;
use lockkeeper_core::{Error, Result, StoreUrl, limits};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_redis::{ConnectOptions, Endpoint, Tls};
use lockkeeper_store_kit::TlsPaths;

/// How to open a store.
///
/// ```
/// # use std::time::Duration;
/// # use lockkeeper_redlock::Options;
/// let options = Options::from_url("redlock://:secret@10.0.0.1,10.0.0.2,10.0.0.3:7000?max_ttl=30s")?;
/// assert_eq!((options.nodes.len(), options.max_ttl), (3, Duration::from_secs(30)));
/// assert_eq!(options.young_node, Duration::from_secs(30), "the default is max_ttl");
/// assert!(Options::from_url("redlock://10.0.0.1,10.0.0.2").is_err(), "two cannot outvote each other");
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// The nodes: an odd number of independent servers, 3 or more.
    pub nodes: Vec<Endpoint>,
    /// User, password, database, encryption; and how long a node may be silent before its connection is closed.
    pub access: ConnectOptions,
    /// The prefix of the key of a lock, before the name: `lock:` by default. Other clients of the same locks need the
    /// same.
    pub prefix: String,
    /// The longest ttl of a request. A node that restarted empty does not vote for as long.
    pub max_ttl: Duration,
    /// How long a node must have been up before it votes; `max_ttl` by default. Zero is for servers that lose nothing when they
    /// restart, or where a second holder is acceptable.
    pub young_node: Duration,
    /// How long a node has for a reply before the others decide without it; never more than a quarter of the ttl.
    pub node_timeout: Duration,
    /// The longest time between two tries of a waiting process, so that a lost notification costs this much at most.
    pub poll: Duration,
    /// The source of time.
    pub clock: Arc<dyn Clock>,
}

const OPTIONS: [&str; 10] =
    ["db", "prefix", "max_ttl", "young_node", "node_timeout", "timeout", "poll", "ca", "cert", "key"];

impl Options {
    /// Parses a URL: `redlock://HOSTS`, or `redlocks://HOSTS` with TLS.
    ///
    /// # Errors
    /// [`Error::Invalid`] that says which part is wrong.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut address = StoreUrl::parse(url)?;
        let encrypted = match address.scheme.as_str() {
            "redlock" => false,
            "redlocks" => true,
            other => return Err(Error::invalid(format!("{other}:// is not the URL of a Redlock store"))),
        };
        let endpoint =
            |(host, port): &(String, Option<u16>)| Endpoint::Tcp(host.clone(), port.unwrap_or(6379));
        let nodes = address.hosts.iter().map(endpoint).collect();
        let access = access(&mut address, encrypted)?;
        let mut options = Options::new(nodes, access);
        options.prefix = address.option("prefix").unwrap_or(options.prefix);
        options.max_ttl = address.duration("max_ttl")?.unwrap_or(options.max_ttl);
        options.young_node = address.duration("young_node")?.unwrap_or(options.max_ttl);
        options.node_timeout = address.duration("node_timeout")?.unwrap_or(options.node_timeout);
        options.poll = address.duration("poll")?.unwrap_or(options.poll);
        address.finish(&OPTIONS)?;
        options.check()?;
        Ok(options)
    }

    /// These nodes, with the defaults for everything else.
    pub fn new(nodes: Vec<Endpoint>, access: ConnectOptions) -> Self {
        Options {
            nodes,
            access,
            prefix: "lock:".into(),
            max_ttl: Duration::from_secs(60),
            young_node: Duration::from_secs(60),
            node_timeout: Duration::from_millis(50),
            poll: Duration::from_millis(500),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        majority(self.nodes.len())?;
        let twice = self.nodes.iter().enumerate().find(|(i, node)| self.nodes[..*i].contains(node));
        if let Some((_, node)) = twice {
            return Err(Error::invalid(format!("the node {node} is in the list twice: it would vote twice")));
        }
        // With a beginning of it as the prefix, a name could complete it and reach the store's own keys.
        let own = "lockkeeper:".starts_with(&self.prefix) || self.prefix.starts_with("lockkeeper:");
        if own || self.prefix.len() > 256 {
            return Err(Error::invalid(format!(
                "the prefix {:?} is not possible: 1 to 256 bytes that neither begin with lockkeeper: nor are its beginning",
                self.prefix
            )));
        }
        if self.max_ttl < limits::TTL_MIN || self.max_ttl > limits::TTL_MAX {
            return Err(Error::invalid("max_ttl is 100ms to 24h"));
        }
        let least = Duration::from_millis(5);
        if self.node_timeout < least
            || self.poll < Duration::from_millis(50)
            || self.access.timeout < least * 10
        {
            return Err(Error::invalid("node_timeout is at least 5ms, poll and timeout at least 50ms"));
        }
        if self.node_timeout > self.access.timeout {
            return Err(Error::invalid("node_timeout is at most as long as timeout"));
        }
        Ok(())
    }
}

fn access(address: &mut StoreUrl, encrypted: bool) -> Result<ConnectOptions> {
    let db = match (address.option("db"), address.path.as_str()) {
        (Some(_), path) if !path.is_empty() => {
            return Err(Error::invalid("the database is given twice: in the path and as ?db="));
        }
        (Some(db), _) => db,
        (None, "") => "0".into(),
        (None, path) => path.into(),
    };
    let db =
        db.parse().map_err(|_| Error::invalid("the database is a number: redlock://HOSTS/0 or ?db=0"))?;
    let tls = match TlsPaths::take(address, encrypted, "redlock")? {
        Some(paths) => Some(Tls::new(paths.ca.as_deref(), paths.identity())?),
        None => None,
    };
    let timeout = address.duration("timeout")?.unwrap_or(Duration::from_secs(1));
    Ok(ConnectOptions { user: address.user.clone(), password: address.password.clone(), db, tls, timeout })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_urls_are_refused() {
        for bad in [
            "redlock://",
            "redlock://a",
            "redlock://a,b",
            "redlock://a,b,c,d",
            "redlock://a,b,a",
            "redlock://a,b,a:6379",
            "redlock://a,b,c/x",
            "redlock://a,b,c/1?db=1",
            "redlock://a,b,c?ca=/x",
            "redlocks://a,b,c?cert=/x",
            "redlock://a,b,c?prefix=",
            "redlock://a,b,c?prefix=l",
            "redlock://a,b,c?prefix=lock",
            "redlock://a,b,c?prefix=lockkeeper",
            "redlock://a,b,c?prefix=lockkeeper:",
            "redlock://a,b,c?prefix=lockkeeper:x",
            "redlock://a,b,c?max_ttl=0s",
            "redlock://a,b,c?node_timeout=1ms",
            "redlock://a,b,c?node_timeout=5s",
            "redlock://a,b,c?poll=1ms",
            "redlock://a,b,c?quorum=2",
            "redis://a,b,c",
        ] {
            assert!(matches!(Options::from_url(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
        let options = Options::from_url("redlocks://u:p@a:1,b:2,c:3/7?young_node=0s&poll=1s").unwrap();
        assert_eq!((options.access.db, options.young_node), (7, Duration::ZERO));
        assert!(options.access.tls.is_some() && options.access.user.as_deref() == Some("u"));
    }
}
