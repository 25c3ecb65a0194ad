//! The cancellation of a statement whose connection the client gives up.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::{CancelToken, Error, NoTls};

use crate::config::{Options, ServerAddr};
use crate::dial::PgSocket;
use crate::error::Failure;

/// Requests that the server cancel the statement of a connection, and waits until the server or the pooler has taken the request. PostgreSQL
/// does not notice that a client is gone while its statement waits for a lock, so the server process of a closed connection would stay
/// for as long.
pub(crate) async fn cancel(options: Arc<Options>, token: CancelToken) {
    let cancelled = tokio::time::timeout(options.timeout, send_cancel(&options, &token)).await;
    if !matches!(cancelled, Ok(Ok(()))) {
        tracing::debug!(
            ?cancelled,
            "an abandoned statement was not cancelled; its statement_timeout ends it"
        );
    }
}

async fn send_cancel(options: &Options, token: &CancelToken) -> Result<(), Failure> {
    let socket = PgSocket::connect(&options.server).await?;
    let sent = match (socket, &options.tls, &options.server) {
        (PgSocket::Unix(mut stream), ..) => {
            let sent = token.cancel_query_raw(KeepOpen(&mut stream), NoTls).await;
            read_to_end(stream, sent).await
        }
        (PgSocket::Tcp(mut stream), Some(tls), ServerAddr::Tcp(host, _)) => {
            let sent = token.cancel_query_raw(&mut stream, tls.handshake(host).keep_open()).await;
            read_to_end(stream, sent).await
        }
        (PgSocket::Tcp(mut stream), ..) => {
            let sent = token.cancel_query_raw(KeepOpen(&mut stream), NoTls).await;
            read_to_end(stream, sent).await
        }
    };
    sent.map_err(|error| Failure::while_connecting(&error, &options.server.to_string()))
}

/// The server replies to the request by closing the socket.
async fn read_to_end(mut stream: impl AsyncRead + Unpin, sent: Result<(), Error>) -> Result<(), Error> {
    if sent.is_ok() {
        _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
    sent
}

/// A socket that is not shut down: the driver shuts it down as soon as it has written the request, and PgBouncer then drops a request that it
/// has not passed on yet. While it passes one on, PgBouncer 1.18 even exits (`bad client state`).
struct KeepOpen<'a, S>(&'a mut S);

impl<S: AsyncRead + Unpin> AsyncRead for KeepOpen<'_, S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for KeepOpen<'_, S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}
