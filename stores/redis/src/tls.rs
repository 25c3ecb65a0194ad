//! TLS: the certificates to trust and to present.

use std::io;
use std::sync::Arc;

use lockkeeper_core::Result;
use lockkeeper_store_kit::tls_config;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The TLS settings of a connection. There is no option to trust any certificate.
#[derive(Clone)]
pub struct Tls(Arc<ClientConfig>);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Trusts the certificate authorities in the file `ca` (PEM), or else those of the machine; presents `identity`
    /// (a certificate and its key, PEM files) to servers that request it.
    ///
    /// # Errors
    /// [`lockkeeper_core::Error::Invalid`] if a file cannot be read or used.
    pub fn new(ca: Option<&str>, identity: Option<(&str, &str)>) -> Result<Self> {
        tls_config(ca, identity).map(Tls)
    }

    pub(crate) async fn wrap(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        TlsConnector::from(self.0.clone()).connect(name, stream).await
    }
}
