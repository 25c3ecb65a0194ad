//! What stands for TLS in a build without it: nothing that could exist.

use std::io;

use lockkeeper_core::{Error, Result};
use tokio::net::TcpStream;
use zookeeper_client::{self as zk, Client};

use crate::refusal::Reason;

/// How to encrypt, and whom to believe. This was built without the feature `tls`: there is none.
#[derive(Clone, Debug)]
pub enum Tls {}

impl Tls {
    /// Says how to get it.
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

    pub(crate) fn judge(&self, _error: &io::Error) -> Option<Reason> {
        match *self {}
    }
}
