use std::fs;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Address, Error, Result, Secret};
use lockkeeper_host::{Clock, SystemClock};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// The shortest claim: etcd keeps nothing for less than two seconds.
pub(crate) const CLAIM_MIN: Duration = Duration::from_secs(2);

/// How to open a store.
///
/// ```
/// # use lockkeeper_etcd::Options;
/// let options = Options::from_url("etcd://me:secret@10.0.0.7,10.0.0.8:2379/jobs?timeout=5s")?;
/// assert_eq!(options.servers, ["10.0.0.7:2379", "10.0.0.8:2379"]);
/// assert_eq!(options.prefix, "jobs/");
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Options {
    /// Where the members of the cluster listen for clients, as `host:port`. One that answers is enough.
    pub servers: Vec<String>,
    /// User and password.
    pub login: Option<(String, Secret)>,
    /// How to encrypt, and whom to believe.
    pub tls: Option<ClientTlsConfig>,
    /// What stands before the name in the keys of a lock: `lock/` by default. `etcdctl lock` needs the same before its
    /// name.
    pub prefix: String,
    /// How long a server may be silent before another one is asked.
    pub timeout: Duration,
    /// How often a waiter looks for itself, whatever it is told: a lost notification costs this much at most.
    pub poll: Duration,
    /// How long the queue entry of a silent process is kept: this long, or as long as the ttl of its request if that is shorter, but at
    /// least two seconds.
    pub claim: Duration,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
}

// The password must not be shown.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let user = self.login.as_ref().map(|(user, _)| user);
        let tls = self.tls.is_some();
        write!(f, "Options({:?}, user {user:?}, tls {tls}, prefix {:?})", self.servers, self.prefix)
    }
}

const OPTIONS: [&str; 6] = ["timeout", "poll", "claim", "ca", "cert", "key"];

impl Options {
    /// From an address: `etcd://[USER:PASSWORD@]HOST[:PORT],…[/PREFIX]`, or `etcds://…` for TLS.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut address = Address::parse(url)?;
        let encrypted = match address.scheme.as_str() {
            "etcd" => false,
            "etcds" => true,
            other => return Err(Error::invalid(format!("{other}:// is not the address of an etcd store"))),
        };
        let login = match (address.user.take(), address.password.take()) {
            (None, None) => None,
            (Some(user), Some(password)) => Some((user, password)),
            _ => return Err(Error::invalid("user and password go together, as etcd://USER:PASSWORD@HOST")),
        };
        let server = |(host, port): &(String, Option<u16>)| {
            let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
            format!("{host}:{}", port.unwrap_or(2379))
        };
        let mut options = Options::new(address.hosts.iter().map(server).collect());
        options.login = login;
        let path = address.path.trim_end_matches('/');
        if !path.is_empty() {
            options.prefix = format!("{path}/");
        }
        let files = (address.option("ca"), address.option("cert"), address.option("key"));
        options.tls = tls(encrypted, files)?;
        options.timeout = address.span("timeout")?.unwrap_or(options.timeout);
        options.poll = address.span("poll")?.unwrap_or(options.poll);
        options.claim = address.span("claim")?.unwrap_or(options.claim);
        address.finish(&OPTIONS)?;
        options.check()?;
        Ok(options)
    }

    /// These servers, and everything else as usual.
    pub fn new(servers: Vec<String>) -> Self {
        Options {
            servers,
            login: None,
            tls: None,
            prefix: "lock/".into(),
            timeout: Duration::from_secs(3),
            poll: Duration::from_secs(10),
            claim: Duration::from_secs(10),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.servers.is_empty() {
            return Err(Error::invalid("a host is missing in the address: etcd://HOST[:PORT],…[/PREFIX]"));
        }
        if self.prefix.len() > 256 || !self.prefix.ends_with('/') || self.prefix.chars().any(char::is_control)
        {
            return Err(Error::invalid(format!(
                "the prefix {:?} is not possible: 1 to 256 bytes of text that end with a slash",
                self.prefix
            )));
        }
        if self.timeout < Duration::from_millis(50) || self.poll < Duration::from_millis(50) {
            return Err(Error::invalid("timeout and poll are at least 50ms"));
        }
        if self.claim < CLAIM_MIN || self.claim > Duration::from_secs(600) {
            return Err(Error::invalid("claim is 2s to 10m: etcd keeps nothing for less than 2s"));
        }
        Ok(())
    }
}

type Files = (Option<String>, Option<String>, Option<String>);

fn tls(encrypted: bool, (ca, cert, key): Files) -> Result<Option<ClientTlsConfig>> {
    let identity = match (cert, key) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some((cert, key)),
        _ => return Err(Error::invalid("?cert= and ?key= go together, and one of them is missing")),
    };
    if !encrypted {
        return match ca.is_some() || identity.is_some() {
            true => {
                Err(Error::invalid("?ca=, ?cert= and ?key= are for TLS, and etcd:// has none: use etcds://"))
            }
            false => Ok(None),
        };
    }
    let read =
        |path: &str| fs::read(path).map_err(|why| Error::invalid(format!("{path} cannot be used: {why}")));
    let mut tls = ClientTlsConfig::new();
    tls = match ca {
        Some(path) => {
            let pem = read(&path)?;
            if !String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE-----") {
                return Err(Error::invalid(format!("{path} cannot be used: there is no certificate in it")));
            }
            tls.ca_certificate(Certificate::from_pem(pem))
        }
        None => tls.with_native_roots(),
    };
    if let Some((cert, key)) = identity {
        tls = tls.identity(Identity::from_pem(read(&cert)?, read(&key)?));
    }
    Ok(Some(tls))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_given_addresses_are_refused() {
        for bad in [
            "etcd://",
            "etcd://me@h",
            "etcd://h?ca=/x",
            "etcds://h?ca=/nowhere",
            "etcds://h?cert=/x",
            "etcd://h?poll=1ms",
            "etcd://h?claim=1s",
            "etcd://h?prefix=x",
            "http://h",
        ] {
            assert!(matches!(Options::from_url(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let options = Options::from_url("etcd://me:secret@h,[::1]:7/a/b/").unwrap();
        assert_eq!(
            (options.servers.as_slice(), &*options.prefix),
            (&["h:2379".into(), "[::1]:7".into()][..], "a/b/")
        );
        assert!(!format!("{options:?}").contains("secret"));
    }
}
