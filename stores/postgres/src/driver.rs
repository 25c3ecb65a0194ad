//! The task that runs one connection: it moves bytes, delivers notifications, and notices a silent server.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockkeeper_store_kit::InFlight;
use tokio::sync::Notify;
use tokio_postgres::{AsyncMessage, CancelToken};

use crate::cancel::cancel;
use crate::config::Options;
use crate::dial::log_in_within_timeout;
use crate::error::Failure;
use crate::session::{PgSession, SessionState, WeakSession};
use crate::shared_connection::SharedConnection;

/// A message of a listening connection.
#[derive(Clone, Debug)]
pub(crate) enum ListenEvent {
    /// A notification on a channel that the connection listens on.
    Notification { channel: String, payload: String },
    /// The connection has ended, and with it all that it listened on.
    Disconnected,
}

/// The receiver of notifications, and of the end of the connection that brought them. It must not block.
pub(crate) type ListenCallback = Arc<dyn Fn(ListenEvent) + Send + Sync>;

/// How often the client sends a keep-alive on a connection that only brings notifications.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Connects, logs in, and leaves the connection running on this runtime.
pub(crate) async fn connect(
    options: Arc<Options>,
    callback: Option<ListenCallback>,
    epoch: i32,
) -> Result<PgSession, Failure> {
    let (client, connection) = log_in_within_timeout(&options).await?;
    let token = client.cancel_token();
    let in_flight = Arc::<InFlight>::default();
    let (abandoned, given_up) = (Arc::<Notify>::default(), Arc::<Notify>::default());
    let session = PgSession::new(SessionState {
        client,
        connection: connection.clone(),
        in_flight: in_flight.clone(),
        epoch,
        prepared: OnceLock::new(),
        exclusive: tokio::sync::Mutex::new(()),
        abandoned: abandoned.clone(),
        given_up: given_up.clone(),
        options: options.clone(),
    });
    let driver = ConnectionDriver {
        connection,
        in_flight,
        abandoned,
        given_up,
        options,
        token,
        callback,
        session: session.downgrade(),
    };
    tokio::spawn(driver.run());
    Ok(session)
}

struct ConnectionDriver {
    connection: Arc<SharedConnection>,
    in_flight: Arc<InFlight>,
    abandoned: Arc<Notify>,
    given_up: Arc<Notify>,
    options: Arc<Options>,
    token: CancelToken,
    callback: Option<ListenCallback>,
    /// Weak, so that the connection ends with the last of its callers.
    session: WeakSession,
}

impl ConnectionDriver {
    /// Runs the connection until it ends, or the server sends no more replies. Where a pooler may be in between, the statement is
    /// cancelled before the connection is closed: a pooler knows the statement only while the client is connected.
    async fn run(self) {
        let ConnectionDriver {
            connection,
            in_flight,
            abandoned,
            given_up,
            options,
            token,
            callback,
            session,
        } = self;
        let (messages, timeout) = (deliver(&connection, callback.as_ref()), options.timeout);
        let mut end =
            DisconnectGuard { connection: &connection, in_flight: &in_flight, callback: callback.clone() };
        let must_cancel = tokio::select! {
            () = messages => false,
            () = in_flight.silence(timeout, || session.clone().probe()) => {
                tracing::warn!(server = %options.server, "no reply for {timeout:?}: closing the connection; the next request dials");
                let prepared = session.upgrade().is_some_and(|session| session.is_prepared());
                if prepared {
                    // In a task of its own, so that callers do not wait for it.
                    tokio::spawn(cancel(options.clone(), token.clone()));
                } else {
                    // The next caller dials, and the caller that waits for a reply gets its error, before the connection is closed.
                    in_flight.close();
                    given_up.notify_one();
                }
                !prepared
            }
            () = keep_alive(session.clone()), if callback.is_some() => false,
            () = abandoned.notified() => true,
        };
        if must_cancel {
            // The cancellation may take as long as `timeout`, and until they are notified waiters and watchers take the connection for one
            // that brings notifications.
            end.report();
            cancel(options, token).await;
        }
    }
}

async fn deliver(connection: &SharedConnection, callback: Option<&ListenCallback>) {
    while let Some(message) = connection.next().await {
        if let (AsyncMessage::Notification(note), Some(callback)) = (message, callback) {
            let (channel, payload) = (note.channel().to_owned(), note.payload().to_owned());
            callback(ListenEvent::Notification { channel, payload });
        }
    }
}

/// Sends a comment every [`KEEP_ALIVE`] on a connection that only brings notifications. If the peer or a proxy in between has vanished,
/// the missing reply shows the silence; no other request would. Never ends by itself.
async fn keep_alive(session: WeakSession) {
    loop {
        tokio::time::sleep(KEEP_ALIVE).await;
        match session.upgrade() {
            Some(session) => _ = session.run("-- LISTEN lockkeeper: keep-alive").await,
            None => std::future::pending().await,
        }
    }
}

/// Closes the connection when its task ends, also with the runtime: callers and the callback are notified.
struct DisconnectGuard<'a> {
    connection: &'a SharedConnection,
    in_flight: &'a InFlight,
    callback: Option<ListenCallback>,
}

impl DisconnectGuard<'_> {
    /// Notifies the callback, once.
    fn report(&mut self) {
        if let Some(callback) = self.callback.take() {
            callback(ListenEvent::Disconnected);
        }
    }
}

impl Drop for DisconnectGuard<'_> {
    fn drop(&mut self) {
        self.in_flight.close();
        self.connection.close();
        self.report();
    }
}
