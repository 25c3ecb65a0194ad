//! Options and the URL of an etcd store.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result, Secret, StoreUrl};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_store_kit::{TlsPaths, login, server_list};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// The shortest claim. etcd gives no lease below two seconds, or below one and a half election timeouts if that is
/// longer.
pub(crate) const CLAIM_MIN: Duration = Duration::from_secs(2);

/// The options of an etcd store.
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
    /// The client addresses of the cluster's members, as `host:port`. One that replies is enough.
    pub servers: Vec<String>,
    /// User and password.
    pub login: Option<(String, Secret)>,
    /// The TLS configuration, with the certificate authorities to trust.
    pub tls: Option<ClientTlsConfig>,
    /// The prefix of all keys: `lock/` by default. `etcdctl lock` needs the same prefix before its name.
    pub prefix: String,
    /// How long a member may be silent before the client fails over to the next one.
    pub timeout: Duration,
    /// How often a waiter reads the queue without a notification: the most that a lost notification can cost.
    pub poll: Duration,
    /// How long the queue entry of a dead process stays. An entry whose request has a shorter ttl stays for that ttl,
    /// but at least two seconds, or one and a half election timeouts of etcd if that is longer.
    pub claim: Duration,
    /// The source of time.
    pub clock: Arc<dyn Clock>,
}

// Never prints the password.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let user = self.login.as_ref().map(|(user, _)| user);
        let tls = self.tls.is_some();
        write!(f, "Options({:?}, user {user:?}, tls {tls}, prefix {:?})", self.servers, self.prefix)
    }
}

const OPTIONS: [&str; 6] = ["timeout", "poll", "claim", "ca", "cert", "key"];

impl Options {
    /// Parses a URL: `etcd://[USER:PASSWORD@]HOST[:PORT],…[/PREFIX]`, or `etcds://…` for TLS.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut address = StoreUrl::parse(url)?;
        let encrypted = match address.scheme.as_str() {
            "etcd" => false,
            "etcds" => true,
            other => return Err(Error::invalid(format!("{other}:// is not the URL of an etcd store"))),
        };
        let login = login(&mut address)?;
        let mut options = Options::new(server_list(&address, 2379));
        options.login = login;
        let path = address.path.trim_end_matches('/');
        if !path.is_empty() {
            options.prefix = format!("{path}/");
        }
        options.tls = match TlsPaths::take(&mut address, encrypted, "etcd")? {
            Some(paths) => Some(tls(&paths)?),
            None => None,
        };
        options.timeout = address.duration("timeout")?.unwrap_or(options.timeout);
        options.poll = address.duration("poll")?.unwrap_or(options.poll);
        options.claim = address.duration("claim")?.unwrap_or(options.claim);
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
            prefix: "lock/".into(),
            timeout: Duration::from_secs(3),
            poll: Duration::from_secs(10),
            claim: Duration::from_secs(10),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.servers.is_empty() {
            return Err(Error::invalid("the URL has no host: etcd://HOST[:PORT],…[/PREFIX]"));
        }
        if self.prefix.len() > 256 || !self.prefix.ends_with('/') || self.prefix.chars().any(char::is_control)
        {
            return Err(Error::invalid(format!(
                "the prefix {:?} is not possible: 1 to 256 bytes of text that end with a slash",
                self.prefix
            )));
        }
        if self.timeout < Duration::from_millis(50) || self.poll < Duration::from_millis(50) {
            return Err(Error::invalid("timeout and poll must be at least 50ms"));
        }
        if self.claim < CLAIM_MIN || self.claim > Duration::from_secs(600) {
            return Err(Error::invalid("claim must be 2s to 10m: etcd gives no lease below 2s"));
        }
        Ok(())
    }
}

fn tls(paths: &TlsPaths) -> Result<ClientTlsConfig> {
    let read =
        |path: &str| fs::read(path).map_err(|why| Error::invalid(format!("{path} cannot be used: {why}")));
    let mut tls = ClientTlsConfig::new();
    tls = match &paths.ca {
        Some(path) => {
            let pem = read(path)?;
            if !String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE-----") {
                return Err(Error::invalid(format!("{path} cannot be used: there is no certificate in it")));
            }
            tls.ca_certificate(Certificate::from_pem(pem))
        }
        None => tls.with_native_roots(),
    };
    if let Some((cert, key)) = paths.identity() {
        tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
    }
    Ok(tls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_urls_are_rejected() {
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
    fn debug_output_hides_the_password() {
        let options = Options::from_url("etcd://me:secret@h,[::1]:7/a/b/").unwrap();
        assert_eq!(
            (options.servers.as_slice(), &*options.prefix),
            (&["h:2379".into(), "[::1]:7".into()][..], "a/b/")
        );
        assert!(!format!("{options:?}").contains("secret"));
    }
}
