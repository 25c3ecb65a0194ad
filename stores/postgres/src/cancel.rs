//! The cancellation of a statement whose connection the client gives up.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use lockkeeper_core::IgnorePoison;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio_postgres::{CancelToken, Error, NoTls};

use crate::config::{Options, ServerAddr};
use crate::dial::PgSocket;
use crate::error::Failure;

/// For how long the client waits until a server or a pooler has taken a cancellation. PgBouncer closes the socket after ten seconds at most,
/// unless it does not run at all meanwhile.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);

/// How many cancellations may be in flight. Each has a thread and a few file descriptors for as long as a pooler without a free server
/// connection lets it wait, and locks need descriptors too.
const MAX_IN_FLIGHT: usize = 16;

/// How many cancellations of this process have not been taken yet, and the signal that one has.
static IN_FLIGHT: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Requests that the server cancel the statement of a connection, and waits until the server or the pooler has taken the request, but no
/// longer than `timeout`. PostgreSQL does not notice that a client is gone while its statement waits for a lock, so the server process
/// of a closed connection would stay for as long.
///
/// The socket of the request belongs to a thread of its own and stays open until the pooler closes it, also if the store is dropped: PgBouncer
/// 1.18 exits if that socket closes while it passes the request on.
pub(crate) async fn cancel(options: Arc<Options>, token: CancelToken) {
    let (timeout, (done, taken)) = (options.timeout, oneshot::channel::<()>());
    let Some(cancellation) = Cancellation::begin() else {
        tracing::debug!(
            "{MAX_IN_FLIGHT} cancellations wait for the server; the statement_timeout ends this statement"
        );
        return;
    };
    let send = move || {
        let _ends = (cancellation, done);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let cancelled = runtime.map(|runtime| runtime.block_on(send_within_limits(&options, &token)));
        if !matches!(cancelled, Ok(Ok(Ok(())))) {
            tracing::debug!(
                ?cancelled,
                "an abandoned statement was not cancelled; its statement_timeout ends it"
            );
        }
    };
    match std::thread::Builder::new().name("lockkeeper-cancel".into()).spawn(send) {
        Ok(_) => _ = tokio::time::timeout(timeout, taken).await,
        Err(error) => {
            tracing::debug!(
                %error,
                "no thread for the cancellation of an abandoned statement; its statement_timeout ends it"
            );
        }
    }
}

/// Waits until the cancellations of this process have been taken, but no longer than `limit`. A process that ends earlier closes their
/// sockets.
pub fn wait_for_cancellations(limit: Duration) {
    let in_flight = IN_FLIGHT.0.lock().ignore_poison();
    _ = IN_FLIGHT.1.wait_timeout_while(in_flight, limit, |in_flight| *in_flight > 0);
}

/// Counts a cancellation until it is dropped.
struct Cancellation;

impl Cancellation {
    /// `None` if too many are in flight.
    fn begin() -> Option<Self> {
        let mut in_flight = IN_FLIGHT.0.lock().ignore_poison();
        (*in_flight < MAX_IN_FLIGHT).then(|| {
            *in_flight += 1;
            Cancellation
        })
    }
}

impl Drop for Cancellation {
    fn drop(&mut self) {
        *IN_FLIGHT.0.lock().ignore_poison() -= 1;
        IN_FLIGHT.1.notify_all();
    }
}

async fn send_within_limits(
    options: &Options,
    token: &CancelToken,
) -> Result<Result<(), Failure>, tokio::time::error::Elapsed> {
    let socket = match tokio::time::timeout(options.timeout, PgSocket::connect(&options.server)).await? {
        Ok(socket) => socket,
        Err(failure) => return Ok(Err(failure)),
    };
    tokio::time::timeout(TAKEN_WITHIN, send_cancel(socket, options, token)).await
}

async fn send_cancel(socket: PgSocket, options: &Options, token: &CancelToken) -> Result<(), Failure> {
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
