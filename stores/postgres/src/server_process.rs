//! Whether one server process serves a connection for its whole life, or a pooler gives each transaction to another one.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_postgres::{Client, Error};

/// The last bytes of a request to cancel: its length, its code, the process id, the secret key; four bytes each.
const CANCEL_REQUEST: usize = 16;

/// Whether the server itself logged the client in, so that one server process serves the connection for its whole life: the state of the
/// session, such as prepared statements and settings, stays with the client.
///
/// The server sends the id of its process with the login, for requests to cancel. A pooler sends an id of its own, because it passes such
/// requests on; the process that runs a statement then has another id. A pooler that gives a client one server process for its whole
/// session is taken for one that does not, which costs speed only.
///
/// # Errors
/// If the connection broke.
pub async fn has_own_server_process(client: &Client) -> Result<bool, Error> {
    let rows = client.query_typed("SELECT pg_catalog.pg_backend_pid()", &[]).await?;
    let serving: Option<i32> = rows.first().and_then(|row| row.try_get(0).ok());
    Ok(serving.is_some() && serving == login_process(client).await)
}

/// The process id that came with the login. The driver shows it only in the request to cancel.
async fn login_process(client: &Client) -> Option<i32> {
    let mut request = RequestRecorder(Vec::new());
    client.cancel_token().cancel_query_raw(&mut request, PlainTls).await.ok()?;
    let start = request.0.len().checked_sub(CANCEL_REQUEST)?;
    let id = request.0[start..].get(8..12)?;
    Some(i32::from_be_bytes(id.try_into().ok()?))
}

/// A socket that leads nowhere: it keeps the bytes that the driver writes, and agrees to TLS.
struct RequestRecorder(Vec<u8>);

impl AsyncRead for RequestRecorder {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        buf.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RequestRecorder {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.0.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for &mut RequestRecorder {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

/// TLS without encryption, for bytes that do not leave the process.
struct PlainTls;

impl<'a> TlsConnect<&'a mut RequestRecorder> for PlainTls {
    type Stream = &'a mut RequestRecorder;
    type Error = Infallible;
    type Future = Ready<Result<&'a mut RequestRecorder, Infallible>>;

    fn connect(self, stream: &'a mut RequestRecorder) -> Self::Future {
        ready(Ok(stream))
    }
}
