//! Stands for TLS in a build without the feature `tls`: a type without values.

use std::io;

use lockkeeper_core::{Error, Result};
use tokio::net::TcpStream;
use zookeeper_client::{self as zk, Client};

use crate::error::RefusalCause;

/// TLS settings. This build does not have the feature `tls`, so there are none.
#[derive(Clone, Debug)]
pub enum TlsDisabled {}

pub use TlsDisabled as ZooKeeperTls;

impl TlsDisabled {
    /// Fails, and says how to get a build with TLS.
    ///
    /// # Errors
    /// [`Error::Unsupported`] always.
    pub fn new(_ca: Option<&str>, _identity: Option<(&str, &str)>) -> Result<Self> {
        Err(Error::Unsupported(
            "this was built without TLS for ZooKeeper: cargo install --path crates/cli --features zookeeper-tls, or the feature \
             \"zookeeper-tls\" of the library"
                .into(),
        ))
    }

    pub(crate) fn check(&self, _host: &str) -> Result<()> {
        match *self {}
    }

    pub(crate) async fn connect(
        &self,
        _connector: zk::Connector,
        _servers: &str,
    ) -> Result<Client, zk::Error> {
        match *self {}
    }

    pub(crate) async fn wrap(&self, _host: &str, _stream: TcpStream) -> io::Result<TcpStream> {
        match *self {}
    }

    pub(crate) fn classify(&self, _error: &io::Error) -> Option<RefusalCause> {
        match *self {}
    }
}
