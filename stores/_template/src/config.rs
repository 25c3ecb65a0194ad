//! Options of the store, and the URL that gives them.

use std::sync::Arc;

use lockkeeper_core::{Error, Result, StoreUrl};
use lockkeeper_host::{Clock, SystemClock};

/// How to open a store.
#[derive(Clone, Debug)]
pub struct Options {
    /// The servers, as `HOST:PORT`.
    pub servers: Vec<String>,
    /// The prefix of all keys, so that several programs, and several laws, can share a server.
    pub prefix: String,
    /// The clock: the machine's own, unless a test uses a virtual one. Take every deadline from it, never from `Instant::now()`.
    pub clock: Arc<dyn Clock>,
}

impl Options {
    /// From `template://HOST[:PORT]/PREFIX`. Fill in: the scheme, the default port, and options by `StoreUrl::option`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is no such URL. The text never repeats a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let url = StoreUrl::parse(url)?;
        if url.scheme != "template" {
            return Err(Error::invalid("the URL of this store is template://HOST[:PORT]/PREFIX"));
        }
        let server = |(host, port): &(String, Option<u16>)| format!("{host}:{}", port.unwrap_or(7000));
        let servers = url.hosts.iter().map(server).collect();
        let prefix = url.path.clone();
        // Refuses the options that were not taken out: a mistyped one must not be ignored.
        url.finish(&[])?;
        Ok(Options { servers, prefix, clock: Arc::new(SystemClock) })
    }
}
