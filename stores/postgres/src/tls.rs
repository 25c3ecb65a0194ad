//! TLS for connections, on rustls.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::TryFutureExt;
use futures_util::future::{Either, MapOk, Ready, ready};
use lockkeeper_core::Result;
use lockkeeper_store_kit::tls_config;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_rustls::client::TlsStream as ClientStream;
use tokio_rustls::{Connect, TlsConnector};

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
        Handshake { connector: TlsConnector::from(self.0.clone()), host: host.to_owned(), keep_open: false }
    }
}

/// The handshake that tokio-postgres runs once the server has agreed to encrypt.
pub(crate) struct Handshake {
    connector: TlsConnector,
    host: String,
    keep_open: bool,
}

impl Handshake {
    /// The stream is not shut down: it ends when the server closes it.
    pub fn keep_open(self) -> Self {
        Handshake { keep_open: true, ..self }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> TlsConnect<S> for Handshake {
    type Stream = Encrypted<S>;
    type Error = io::Error;
    type Future =
        Either<Ready<io::Result<Encrypted<S>>>, MapOk<Connect<S>, fn(ClientStream<S>) -> Encrypted<S>>>;

    fn connect(self, stream: S) -> Self::Future {
        let encrypted: fn(ClientStream<S>) -> Encrypted<S> = match self.keep_open {
            true => |stream| Encrypted { stream, keep_open: true },
            false => |stream| Encrypted { stream, keep_open: false },
        };
        match ServerName::try_from(self.host) {
            Ok(name) => Either::Right(self.connector.connect(name, stream).map_ok(encrypted)),
            Err(error) => Either::Left(ready(Err(io::Error::other(error)))),
        }
    }
}

pub(crate) struct Encrypted<S> {
    stream: ClientStream<S>,
    keep_open: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Encrypted<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Encrypted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Encrypted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.keep_open {
            true => self.poll_flush(cx),
            false => Pin::new(&mut self.stream).poll_shutdown(cx),
        }
    }
}
