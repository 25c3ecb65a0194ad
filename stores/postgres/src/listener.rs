//! The connection that brings notifications, and whether notifications reach this client at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::connection::Connection;
use crate::error::Failure;
use crate::statements::NOTIFY;

/// The listening connection. It is made when the first task waits or watches.
pub(crate) struct NotificationListener {
    connection: Connection,
    /// The random id of this process.
    client: String,
    /// Whether notifications reach this client: not through a pooler that gives each transaction to another server process.
    works: AtomicBool,
    probe_arrived: Notify,
}

impl NotificationListener {
    pub fn new(connection: Connection, client: String) -> Self {
        NotificationListener {
            connection,
            client,
            works: AtomicBool::new(false),
            probe_arrived: Notify::new(),
        }
    }

    /// The channel on which waiters of this process are woken.
    pub fn wake_channel(&self) -> String {
        format!("lockkeeper_{}", self.client)
    }

    pub fn probe_channel(&self) -> String {
        format!("lockkeeper_try_{}", self.client)
    }

    /// Whether notifications reach this client.
    pub fn works(&self) -> bool {
        self.works.load(Ordering::Relaxed)
    }

    /// A notification came on the probe channel.
    pub fn probe_arrived(&self) {
        self.probe_arrived.notify_one();
    }

    /// Listens on a channel from now on. Returns whether that succeeded.
    pub async fn listen(&self, channel: &str) -> bool {
        let listened = async { self.connection.session().await?.run(&format!("LISTEN {channel}")).await };
        match listened.await {
            Ok(()) => true,
            Err(failure) => {
                tracing::debug!(?failure, "cannot listen for notifications; waiters poll until it works");
                false
            }
        }
    }

    /// Finds out whether notifications reach this client: only if one server process serves the connection for its whole life, a
    /// notification that the client sends to itself arrives. Nothing else shows a pooler: it may even have the server's port.
    pub async fn probe(&self, queries: &Connection, timeout: Duration) -> Result<bool, Failure> {
        let channel = self.probe_channel();
        let began = Instant::now();
        if !self.listen(&channel).await {
            return Ok(false);
        }
        queries.rows(&NOTIFY, &[&channel, &""]).await?;
        // Behind a pooler no notification comes, and every client that opens the store waits this long. On a slow connection a
        // notification may take longer too.
        let patience = Duration::from_secs(1).max(began.elapsed() * 10).min(timeout);
        let over = queries.runtime().spawn(async move { tokio::time::sleep(patience).await });
        let arrived = tokio::select! {
            () = self.probe_arrived.notified() => true,
            _ = over => false,
        };
        self.works.store(arrived, Ordering::Relaxed);
        // Behind a pooler this connection may serve other clients. A task that waits or watches makes a new one.
        self.connection.close();
        Ok(arrived)
    }
}
