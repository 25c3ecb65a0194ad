//! A connection that more than one moves on.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::{AsyncMessage, Connection};

/// What moves both ways on a connection. A task on the store's thread sees to it; whoever asks moves its own question on, at once,
/// which spares it the time until that thread has woken up.
pub(crate) struct Talk {
    /// `None`: it is over.
    connection: Mutex<Option<Box<dyn Moves>>>,
    /// Who sees to it.
    waker: OnceLock<Waker>,
}

pub(crate) trait Moves: Send {
    fn poll_message(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<AsyncMessage, tokio_postgres::Error>>>;
}

impl<S, T> Moves for Connection<S, T>
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

/// The next message of a connection; `None`, and the connection is closed: it is over, or what it says next is not to be believed.
fn advance(connection: &mut Option<Box<dyn Moves>>, cx: &mut Context<'_>) -> Poll<Option<AsyncMessage>> {
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

/// Whether the server warns that a statement is committed here, and perhaps not at the standby that it was to wait for: somebody
/// cancelled the wait. Its reply follows, and looks like any other. The function of PostgreSQL that says so (syncrep.c) is the same in
/// every language and version.
fn is_unreplicated(message: &AsyncMessage) -> bool {
    matches!(message, AsyncMessage::Notice(notice) if notice.routine() == Some("SyncRepWaitForLSN"))
}

impl Talk {
    pub fn new(connection: impl Moves + 'static) -> Arc<Self> {
        Arc::new(Talk { connection: Mutex::new(Some(Box::new(connection))), waker: OnceLock::new() })
    }

    /// The next message; `None`: the connection is over.
    pub async fn next(&self) -> Option<AsyncMessage> {
        poll_fn(|cx| {
            let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            _ = self.waker.set(cx.waker().clone());
            advance(&mut connection, cx)
        })
        .await
    }

    /// Hangs up: whatever was asked and not answered is told so.
    pub fn end(&self) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Moves on what was handed in, if nobody does so already. Where messages come this is left to the one who passes them on.
    fn nudge(&self) {
        let (Some(waker), Ok(mut connection)) = (self.waker.get(), self.connection.try_lock()) else {
            return;
        };
        if connection.is_none() {
            return;
        }
        if advance(&mut connection, &mut Context::from_waker(waker)).is_ready() {
            // There may be more to move than this remark of the server's; or it is over.
            waker.wake_by_ref();
        }
    }

    /// Asks, and sees to it that the question leaves.
    pub async fn soon<T>(&self, ask: impl Future<Output = T>) -> T {
        let mut ask = pin!(ask);
        let mut left = false;
        poll_fn(|cx| {
            let answer = ask.as_mut().poll(cx);
            if answer.is_pending() && !std::mem::replace(&mut left, true) {
                self.nudge();
            }
            answer
        })
        .await
    }
}
