//! Options of the store, and how an address becomes options.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result, Secret, StoreUrl};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_store_kit::{TlsPaths, login, server_list};

use crate::four_letter;
use crate::tls::ZooKeeperTls;

/// How to open a store.
///
/// ```
/// # use lockkeeper_zookeeper::Options;
/// let options = Options::from_url("zk://me:secret@10.0.0.7,10.0.0.8:2181/jobs?session=20s")?;
/// assert_eq!(options.servers, ["10.0.0.7:2181", "10.0.0.8:2181"]);
/// assert_eq!(options.base, "/jobs");
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Options {
    /// The client addresses of the servers, as `host:port`. One reachable server is enough.
    pub servers: Vec<String>,
    /// User and password for digest authentication.
    pub login: Option<(String, Secret)>,
    /// TLS, with the certificates to trust.
    pub tls: Option<ZooKeeperTls>,
    /// The node under which all locks are stored: `/lock` by default.
    pub base: String,
    /// Whether the store creates that node if it is missing. A path in an address that does not exist is more often
    /// mistyped than new.
    pub create: bool,
    /// How long the client waits for a reply before it tries another server.
    pub timeout: Duration,
    /// How often a waiter reads its queue without a notification. A lost notification delays it by no more than this.
    pub poll: Duration,
    /// The session timeout: how long the locks of a dead process stay. The servers limit it.
    pub session: Duration,
    /// How often one of the processes that use the store removes what dead processes have left.
    pub sweep: Duration,
    /// The source of time.
    pub clock: Arc<dyn Clock>,
}

// The password must not be printed.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let user = self.login.as_ref().map(|(user, _)| user);
        let tls = self.tls.is_some();
        write!(f, "Options({:?}, user {user:?}, tls {tls}, base {:?})", self.servers, self.base)
    }
}

const OPTIONS: [&str; 8] = ["timeout", "poll", "session", "sweep", "create", "ca", "cert", "key"];

impl Options {
    /// From an address: `zk://[USER:PASSWORD@]HOST[:PORT],…[/PATH]`, or `zks://…` for TLS.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong; [`Error::Unsupported`] for `zks://` in a build without TLS.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut address = StoreUrl::parse(url)?;
        let encrypted = match address.scheme.as_str() {
            "zk" => false,
            "zks" => true,
            other => {
                return Err(Error::invalid(format!("{other}:// is not the address of a ZooKeeper store")));
            }
        };
        let login = login(&mut address)?;
        let mut options = Options::new(server_list(&address, 2181));
        options.login = login;
        options.tls = match TlsPaths::take(&mut address, encrypted, "zk")? {
            Some(paths) => Some(ZooKeeperTls::new(paths.ca.as_deref(), paths.identity())?),
            None => None,
        };
        let path = address.path.trim_end_matches('/');
        if !path.is_empty() {
            (options.base, options.create) = (format!("/{path}"), false);
        }
        options.create = match address.option("create").as_deref() {
            None => options.create,
            Some("yes") => true,
            Some("no") => false,
            Some(_) => return Err(Error::invalid("create is yes or no")),
        };
        options.timeout = address.duration("timeout")?.unwrap_or(options.timeout);
        options.poll = address.duration("poll")?.unwrap_or(options.poll);
        options.session = address.duration("session")?.unwrap_or(options.session);
        options.sweep = address.duration("sweep")?.unwrap_or(options.sweep);
        address.finish(&OPTIONS)?;
        options.check()?;
        Ok(options)
    }

    /// These servers, and the defaults for everything else.
    pub fn new(servers: Vec<String>) -> Self {
        Options {
            servers,
            login: None,
            tls: None,
            base: "/lock".into(),
            create: true,
            timeout: Duration::from_secs(3),
            poll: Duration::from_secs(10),
            session: Duration::from_secs(15),
            sweep: Duration::from_secs(3600),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.servers.is_empty() {
            return Err(Error::invalid("the address has no host: zk://HOST[:PORT],…[/PATH]"));
        }
        if let Some(tls) = &self.tls {
            self.servers.iter().try_for_each(|server| tls.check(four_letter::host(server)))?;
        }
        let is_bad = |part: &str| {
            let is_bad_char =
                |c: char| c.is_control() || ('\u{e000}'..='\u{f8ff}').contains(&c) || c >= '\u{fff0}';
            part.is_empty() || part == "." || part == ".." || part.chars().any(is_bad_char)
        };
        let mut parts = self.base.split('/');
        let rooted = parts.next() == Some("");
        if !rooted || self.base.len() > 256 || parts.any(is_bad) || self.base.starts_with("/zookeeper") {
            return Err(Error::invalid(format!(
                "the path {:?} is not possible: 1 to 256 bytes, no empty part, no . and .., not below /zookeeper",
                self.base
            )));
        }
        if self.timeout < Duration::from_millis(50) || self.poll < Duration::from_millis(50) {
            return Err(Error::invalid("timeout and poll are at least 50ms"));
        }
        if self.session < Duration::from_millis(200) || self.session > Duration::from_secs(600) {
            return Err(Error::invalid("session is 200ms to 10m"));
        }
        if self.sweep < Duration::from_secs(1) {
            return Err(Error::invalid("sweep is at least 1s"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_addresses_are_refused() {
        for bad in [
            "zk://",
            "zk://me@h",
            "zk://h/a//b",
            "zk://h/a/../b",
            "zk://h/zookeeper/x",
            "zk://h?poll=1ms",
            "zk://h?session=1ms",
            "zk://h?create=maybe",
            "zk://h?prefix=x",
            "zk://h?ca=/x",
            "zk://h?cert=/x&key=/x",
            "zks://h?cert=/x",
            "http://h",
        ] {
            assert!(matches!(Options::from_url(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn a_build_without_tls_says_how_to_get_it() {
        let refused = Options::from_url("zks://h").unwrap_err();
        assert!(
            matches!(&refused, Error::Unsupported(why) if why.contains("--features zookeeper-tls")),
            "{refused}"
        );
    }

    #[test]
    fn debug_output_hides_the_password() {
        let options = Options::from_url("zk://me:secret@h,[::1]:7/a/b/").unwrap();
        assert_eq!(
            (options.servers.as_slice(), &*options.base, options.create),
            (&["h:2181".into(), "[::1]:7".into()][..], "/a/b", false)
        );
        assert!(!format!("{options:?}").contains("secret"));
    }
}
