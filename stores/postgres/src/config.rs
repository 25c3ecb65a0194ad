//! The options of the store, and the address that they are read from.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result, Secret, StoreUrl};
use lockkeeper_host::{Clock, SystemClock};
use tokio::runtime::Handle;

use crate::tls::PostgresTls;

/// Where the server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddr {
    /// A host and a port.
    Tcp(String, u16),
    /// A Unix socket in this directory, with this port number in its name.
    Unix(String, u16),
}

impl std::fmt::Display for ServerAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ServerAddr::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            ServerAddr::Tcp(host, port) => write!(f, "{host}:{port}"),
            ServerAddr::Unix(dir, port) => write!(f, "{dir}/.s.PGSQL.{port}"),
        }
    }
}

/// How to open a store.
///
/// ```
/// # use lockkeeper_postgres::{ServerAddr, Options};
/// let options = Options::from_url("postgres://app:secret@10.0.0.7/orders?schema=locks")?;
/// assert_eq!((options.user.as_str(), options.database.as_str()), ("app", "orders"));
/// let options = Options::from_url("postgres://app@/orders?host=/run/postgresql")?;
/// assert_eq!(options.server, ServerAddr::Unix("/run/postgresql".into(), 5432));
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Options {
    /// The address of the server.
    pub server: ServerAddr,
    /// The role that logs in.
    pub user: String,
    /// The password.
    pub password: Option<Secret>,
    /// The database.
    pub database: String,
    /// The schema of the store's tables: `lockkeeper` by default. The store creates it if it does not exist.
    pub schema: String,
    /// TLS, or `None` for a connection without encryption.
    pub tls: Option<PostgresTls>,
    /// How long the server may be silent, with a request in flight, before the client closes the connection.
    pub timeout: Duration,
    /// How often a process with waiters polls: a lost notification costs this much time at most.
    pub poll: Duration,
    /// How long the queue entries of a silent process are kept.
    pub claim: Duration,
    /// The clock of this process.
    pub clock: Arc<dyn Clock>,
    /// The runtime that drives the connections, with I/O and timers; `None` for a thread of the store's own. A caller on that
    /// runtime has its reply sooner, by the time that one thread takes to wake another. But while tasks keep that runtime busy, the
    /// store waits too: leases are not renewed meanwhile.
    pub runtime: Option<Handle>,
}

// The password is not shown.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "postgres://{}@{}/{}?schema={}", self.user, self.server, self.database, self.schema)
    }
}

const OPTIONS: [&str; 10] =
    ["host", "schema", "sslmode", "ca", "cert", "key", "timeout", "poll", "claim", "runtime"];

impl Options {
    /// From an address: `postgres://USER:PASSWORD@HOST:PORT/DATABASE` or `postgresql://…`.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut address = StoreUrl::parse(url)?;
        if !matches!(address.scheme.as_str(), "postgres" | "postgresql") {
            let scheme = &address.scheme;
            return Err(Error::invalid(format!("{scheme}:// is not the address of a PostgreSQL store")));
        }
        let server = server(&mut address)?;
        let tls = tls(&mut address, &server)?;
        let user = address.user.clone().filter(|user| !user.is_empty());
        let Some(user) = user.or_else(|| std::env::var("USER").ok().filter(|user| !user.is_empty())) else {
            return Err(Error::invalid("the user is missing in the address: postgres://USER@HOST/DATABASE"));
        };
        let database = if address.path.is_empty() { user.clone() } else { address.path.clone() };
        let mut options = Options::new(server, user, database);
        options.password = address.password.clone();
        options.tls = tls;
        if let Some(schema) = address.option("schema") {
            options.schema = schema;
        }
        options.timeout = address.duration("timeout")?.unwrap_or(options.timeout);
        options.poll = address.duration("poll")?.unwrap_or(options.poll);
        options.claim = address.duration("claim")?.unwrap_or(options.claim);
        options.runtime = runtime(&mut address)?;
        address.finish(&OPTIONS)?;
        options.check()?;
        Ok(options)
    }

    /// Options for this server, user and database, with the defaults for the rest.
    pub fn new(server: ServerAddr, user: impl Into<String>, database: impl Into<String>) -> Self {
        Options {
            server,
            user: user.into(),
            password: None,
            database: database.into(),
            schema: "lockkeeper".into(),
            tls: None,
            timeout: Duration::from_secs(3),
            poll: Duration::from_secs(1),
            claim: Duration::from_secs(5),
            clock: Arc::new(SystemClock),
            runtime: None,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let first = self.schema.chars().next();
        // The schema becomes a part of SQL text: no character that needs quoting is allowed.
        if !first.is_some_and(|c| c.is_ascii_lowercase() || c == '_')
            || !self.schema.chars().all(plain)
            || self.schema.len() > 40
            || self.schema.starts_with("pg_")
        {
            return Err(Error::invalid(format!(
                "the schema {:?} is not possible: a-z, 0-9 and _, at most 40, not beginning with a digit or pg_",
                self.schema
            )));
        }
        if self.poll < Duration::from_millis(50)
            || self.claim < self.poll * 2
            || self.claim > Duration::from_secs(600)
        {
            return Err(Error::invalid(
                "poll is at least 50ms, and claim at least twice as long as poll and at most 10m",
            ));
        }
        if self.timeout < Duration::from_millis(50) {
            return Err(Error::invalid("the timeout is at least 50ms"));
        }
        Ok(())
    }
}

fn server(address: &mut StoreUrl) -> Result<ServerAddr> {
    let dir = address.option("host");
    let (host, port) = match &address.hosts[..] {
        [] => (None, 5432),
        [(host, port)] => (Some(host.clone()), port.unwrap_or(5432)),
        _ => {
            return Err(Error::invalid(
                "a PostgreSQL store is one database: name its primary, or a name that leads to it",
            ));
        }
    };
    match (host.filter(|host| !host.is_empty()), dir) {
        (Some(_), Some(_)) => Err(Error::invalid("the host is given twice: before the slash and as ?host=")),
        (None, None) => Err(Error::invalid("the host is missing: postgres://USER@HOST/DATABASE")),
        (Some(host), None) | (None, Some(host)) => {
            Ok(if host.starts_with('/') { ServerAddr::Unix(host, port) } else { ServerAddr::Tcp(host, port) })
        }
    }
}

fn runtime(address: &mut StoreUrl) -> Result<Option<Handle>> {
    match address.option("runtime").as_deref() {
        None | Some("own") => Ok(None),
        Some("caller") => Handle::try_current().map(Some).map_err(|_| {
            Error::invalid(
                "runtime=caller is for a store that is opened on a tokio runtime, and there is none here",
            )
        }),
        Some(other) => Err(Error::invalid(format!("runtime={other} is not possible: own or caller is"))),
    }
}

fn tls(address: &mut StoreUrl, server: &ServerAddr) -> Result<Option<PostgresTls>> {
    let (ca, cert, key) = (address.option("ca"), address.option("cert"), address.option("key"));
    let identity = match (cert.as_deref(), key.as_deref()) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some((cert, key)),
        _ => return Err(Error::invalid("?cert= and ?key= go together, and one of them is missing")),
    };
    match address.option("sslmode").as_deref() {
        None | Some("disable") if ca.is_none() && identity.is_none() => Ok(None),
        None | Some("disable") => {
            Err(Error::invalid("?ca=, ?cert= and ?key= are for TLS: add sslmode=verify-full"))
        }
        Some("require" | "verify-full") if matches!(server, ServerAddr::Unix(..)) => {
            Err(Error::invalid("a socket of this machine is not encrypted: leave sslmode out"))
        }
        Some("require" | "verify-full") => PostgresTls::new(ca.as_deref(), identity).map(Some),
        Some(other) => Err(Error::invalid(format!(
            "sslmode={other} is not possible: disable, require or verify-full are (both of these check the \
             certificate and its name)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_address_is_read() {
        let server = |url: &str| Options::from_url(url).unwrap().server;
        assert_eq!(server("postgres://u@h/d"), ServerAddr::Tcp("h".into(), 5432));
        assert_eq!(server("postgresql://u@[::1]:7/d"), ServerAddr::Tcp("::1".into(), 7));
        assert_eq!(server("postgres://u@%2Frun%2Fpg:7/d"), ServerAddr::Unix("/run/pg".into(), 7));
        assert_eq!(Options::from_url("postgres://u@h").unwrap().database, "u");
        assert!(Options::from_url("postgres://u@h?sslmode=require").unwrap().tls.is_some());
        let shown = format!("{:?}", Options::from_url("postgres://u:secret@h/d").unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }

    #[test]
    fn half_given_addresses_are_refused() {
        for bad in [
            "postgres://",
            "postgres://u@a,b/d",
            "postgres://u@h/d?host=/run",
            "postgres://u@h/d?schema=Locks",
            "postgres://u@h/d?schema=a;b",
            "postgres://u@h/d?schema=",
            "postgres://u@h/d?sslmode=prefer",
            "postgres://u@h/d?ca=/x",
            "postgres://u@h/d?sslmode=require&cert=/x",
            "postgres://u@h/d?sslmode=require&ca=/nowhere",
            "postgres://u@/d?host=/run&sslmode=require",
            "postgres://u@h/d?poll=1ms",
            "postgres://u@h/d?poll=10s",
            "postgres://u@h/d?application_name=x",
            "postgres://u@h/d?runtime=mine",
            "postgres://u@h/d?runtime=caller",
            "redis://h",
        ] {
            assert!(matches!(Options::from_url(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }
}
