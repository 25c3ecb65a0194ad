//! TLS for connections, on rustls.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use lockkeeper_core::Result;
use lockkeeper_store_kit::tls_config;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;

/// The TLS configuration: which certificates the client trusts, and which it presents. There is no way to skip the check.
#[derive(Clone)]
pub struct PostgresTls(Arc<ClientConfig>);

impl std::fmt::Debug for PostgresTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl PostgresTls {
    /// Trusts the certificate authorities in the file `ca` (PEM), or else those of the machine; presents `identity`
    /// (a certificate and its key, PEM files) to servers that request it.
    ///
    /// # Errors
    /// [`lockkeeper_core::Error::Invalid`] if a file cannot be read or used.
    pub fn new(ca: Option<&str>, identity: Option<(&str, &str)>) -> Result<Self> {
        tls_config(ca, identity).map(PostgresTls)
    }

    /// The TLS handshake of a connection to this host.
    pub(crate) fn handshake(&self, host: &str) -> Handshake {
        Handshake { connector: TlsConnector::from(self.0.clone()), host: host.to_owned() }
    }
}

/// The handshake that tokio-postgres runs once the server has agreed to encrypt.
pub(crate) struct Handshake {
    connector: TlsConnector,
    host: String,
}

impl TlsConnect<TcpStream> for Handshake {
    type Stream = Encrypted;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Encrypted>> + Send>>;

    fn connect(self, stream: TcpStream) -> Self::Future {
        Box::pin(async move {
            let name = ServerName::try_from(self.host).map_err(io::Error::other)?;
            self.connector.connect(name, stream).await.map(Encrypted)
        })
    }
}

pub(crate) struct Encrypted(tokio_rustls::client::TlsStream<TcpStream>);

impl TlsStream for Encrypted {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for Encrypted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Encrypted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
