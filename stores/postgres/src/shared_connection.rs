//! A driver connection that several tasks may advance.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};

use lockkeeper_core::IgnorePoison;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::{AsyncMessage, Connection};

/// The I/O of one connection. A task on the store's thread runs it; a caller also advances it once for its own request, which saves
/// the time until that thread has woken up.
pub(crate) struct SharedConnection {
    /// `None`: the connection has ended.
    connection: Mutex<Option<Box<dyn PollMessage>>>,
    /// The waker of the task that runs the connection.
    waker: OnceLock<Waker>,
}

pub(crate) trait PollMessage: Send {
    fn poll_message(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<AsyncMessage, tokio_postgres::Error>>>;
}

impl<S, T> PollMessage for Connection<S, T>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    T: AsyncRead + AsyncWrite + Unpin + Send,
{
    fn poll_message(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<AsyncMessage, tokio_postgres::Error>>> {
        Connection::poll_message(self, cx)
    }
}

/// The next message of a connection. `None`: the connection has ended, or its next reply must not be trusted, and it is closed.
fn advance(
    connection: &mut Option<Box<dyn PollMessage>>,
    cx: &mut Context<'_>,
) -> Poll<Option<AsyncMessage>> {
    let Some(open) = connection.as_mut() else { return Poll::Ready(None) };
    match open.poll_message(cx) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(Some(Ok(message))) if !is_unreplicated(&message) => Poll::Ready(Some(message)),
        Poll::Ready(_) => {
            *connection = None;
            Poll::Ready(None)
        }
    }
}

/// Whether the server warns that a statement is committed here, and perhaps not at the standby that it should wait for, because
/// the wait was cancelled. The reply that follows looks like any other. The function of PostgreSQL that reports it (syncrep.c) has the
/// same name in every language and version.
fn is_unreplicated(message: &AsyncMessage) -> bool {
    matches!(message, AsyncMessage::Notice(notice) if notice.routine() == Some("SyncRepWaitForLSN"))
}

impl SharedConnection {
    pub fn new(connection: impl PollMessage + 'static) -> Arc<Self> {
        Arc::new(SharedConnection {
            connection: Mutex::new(Some(Box::new(connection))),
            waker: OnceLock::new(),
        })
    }

    /// The next message; `None`: the connection has ended.
    pub async fn next(&self) -> Option<AsyncMessage> {
        poll_fn(|cx| {
            let mut connection = self.connection.lock().ignore_poison();
            _ = self.waker.set(cx.waker().clone());
            advance(&mut connection, cx)
        })
        .await
    }

    /// Closes the connection: requests without a reply end with an error.
    pub fn close(&self) {
        *self.connection.lock().ignore_poison() = None;
    }

    /// Advances the connection, unless another task does so already. The task that runs the connection reads on from there.
    fn advance_once(&self) {
        let (Some(waker), Ok(mut connection)) = (self.waker.get(), self.connection.try_lock()) else {
            return;
        };
        if connection.is_none() {
            return;
        }
        if advance(&mut connection, &mut Context::from_waker(waker)).is_ready() {
            // There may be more to read than this notice of the server; or the connection has ended.
            waker.wake_by_ref();
        }
    }

    /// Polls a request, and writes it to the socket at once.
    pub async fn send_now<T>(&self, request: impl Future<Output = T>) -> T {
        let mut request = pin!(request);
        let mut sent = false;
        poll_fn(|cx| {
            let reply = request.as_mut().poll(cx);
            if reply.is_pending() && !std::mem::replace(&mut sent, true) {
                self.advance_once();
            }
            reply
        })
        .await
    }
}
