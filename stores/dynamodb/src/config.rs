//! The options of the store, and its URL.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Result, Secret, StoreUrl};
use lockkeeper_host::{Clock, SystemClock};

/// How to open a store.
///
/// ```
/// # use lockkeeper_dynamodb::Options;
/// let options = Options::from_url("dynamodb://eu-central-1/locks?poll=2s")?;
/// assert_eq!((&*options.region, &*options.table), ("eu-central-1", "locks"));
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Options {
    /// The region of the table.
    pub region: String,
    /// The table.
    pub table: String,
    /// The server, if it is not Amazon's endpoint of the region: `http://127.0.0.1:8000`.
    pub endpoint: Option<String>,
    /// An access key and its secret. Without them the SDK searches its usual sources: environment, profile, SSO, web identity, ECS, EC2.
    pub login: Option<(String, Secret)>,
    /// How long a reply may take.
    pub timeout: Duration,
    /// The longest time between two polls of a waiter.
    pub poll: Duration,
    /// The source of time.
    pub clock: Arc<dyn Clock>,
}

// The secret is not shown.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let key = self.login.as_ref().map(|(key, _)| key);
        let Options { region, table, endpoint, .. } = self;
        write!(f, "Options({region}, {table:?}, endpoint {endpoint:?}, key {key:?})")
    }
}

const OPTIONS: [&str; 3] = ["endpoint", "timeout", "poll"];
const SHAPE: &str = "dynamodb://[KEY:SECRET@]REGION/TABLE";

impl Options {
    /// Parses a URL: `dynamodb://[KEY:SECRET@]REGION/TABLE[?endpoint=…&timeout=…&poll=…]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] that says which part is wrong.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut address = StoreUrl::parse(url)?;
        if address.scheme != "dynamodb" {
            return Err(Error::invalid(format!("{}:// is not the URL of a DynamoDB store", address.scheme)));
        }
        let login = match (address.user.take(), address.password.take()) {
            (None, None) => None,
            (Some(key), Some(secret)) => Some((key, secret)),
            _ => return Err(Error::invalid(format!("the access key and its secret go together: {SHAPE}"))),
        };
        let region = match &address.hosts[..] {
            [(region, None)] => region.clone(),
            _ => return Err(Error::invalid(format!("one region is needed, and no port: {SHAPE}"))),
        };
        let mut options = Options::new(&region, address.path.trim_end_matches('/'));
        options.login = login;
        options.endpoint = address.option("endpoint");
        options.timeout = address.duration("timeout")?.unwrap_or(options.timeout);
        options.poll = address.duration("poll")?.unwrap_or(options.poll);
        address.finish(&OPTIONS)?;
        options.check()?;
        Ok(options)
    }

    /// This table, with the defaults for everything else.
    pub fn new(region: &str, table: &str) -> Self {
        Options {
            region: region.into(),
            table: table.into(),
            endpoint: None,
            login: None,
            timeout: Duration::from_secs(3),
            poll: Duration::from_secs(1),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if !(3..=255).contains(&self.table.len()) || !self.table.chars().all(plain) {
            return Err(Error::invalid(format!(
                "{:?} cannot be the name of a table: 3 to 255 letters, digits, '_', '.' and '-', as {SHAPE}",
                self.table
            )));
        }
        if self.region.is_empty() || !self.region.chars().all(plain) {
            return Err(Error::invalid(format!("{:?} is not a region: {SHAPE}", self.region)));
        }
        let web = |url: &String| url.starts_with("http://") || url.starts_with("https://");
        if self.endpoint.as_ref().is_some_and(|url| !web(url)) {
            return Err(Error::invalid("an endpoint begins with http:// or https://"));
        }
        if self.timeout < Duration::from_millis(50) || self.poll < Duration::from_millis(20) {
            return Err(Error::invalid("timeout is at least 50ms and poll at least 20ms"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_urls_are_refused() {
        for bad in [
            "dynamodb://",
            "dynamodb://eu-central-1",
            "dynamodb://eu-central-1/",
            "dynamodb:///locks",
            "dynamodb://a,b/locks",
            "dynamodb://a:80/locks",
            "dynamodb://me@a/locks",
            "dynamodb://a/my locks",
            "dynamodb://a/locks?endpoint=localhost:8000",
            "dynamodb://a/locks?skew=5s",
            "dynamodb://a/locks?poll=1ms",
            "dynamodb://a/locks?tabel=x",
            "http://a/locks",
        ] {
            assert!(matches!(Options::from_url(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }

    #[test]
    fn a_secret_is_never_shown() {
        let options = Options::from_url("dynamodb://AKID:s%2Fecret@a/locks?endpoint=http://h:1").unwrap();
        assert_eq!(options.login, Some(("AKID".into(), "s/ecret".into())));
        assert_eq!(options.endpoint.as_deref(), Some("http://h:1"));
        assert!(!format!("{options:?}").contains("ecret"));
    }
}
