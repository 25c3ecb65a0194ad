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

impl Talk {
    pub fn new(connection: impl Moves + 'static) -> Arc<Self> {
        Arc::new(Talk { connection: Mutex::new(Some(Box::new(connection))), waker: OnceLock::new() })
    }

    /// The next message; `None`: the connection is over.
    pub async fn next(&self) -> Option<AsyncMessage> {
        poll_fn(|cx| {
            let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            _ = self.waker.set(cx.waker().clone());
            connection.as_mut().map_or(Poll::Ready(None), |connection| connection.poll_message(cx))
        })
        .await
        .and_then(Result::ok)
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
        let Some(open) = connection.as_mut() else { return };
        if let Poll::Ready(told) = open.poll_message(&mut Context::from_waker(waker)) {
            if !matches!(told, Some(Ok(_))) {
                *connection = None;
            }
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
