//! One open connection: running statements on it, prepared or not.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, OnceLock, Weak};

use futures_util::future::try_join_all;
use lockkeeper_store_kit::{InFlight, Request};
use tokio::sync::Notify;
use tokio_postgres::types::{FromSqlOwned, ToSql};
use tokio_postgres::{Client, Row, Statement};

use crate::config::Options;
use crate::error::Failure;
use crate::shared_connection::SharedConnection;
use crate::statements::{PREPARED, PgStatement};

pub(crate) type Param<'a> = &'a (dyn ToSql + Sync);

/// A connection that is open as far as the client knows. Clones share it; it ends with the last of them.
#[derive(Clone)]
pub(crate) struct PgSession(Arc<SessionState>);

pub(crate) struct SessionState {
    pub client: Client,
    pub connection: Arc<SharedConnection>,
    pub in_flight: Arc<InFlight>,
    pub epoch: i32,
    pub prepared: OnceLock<HashMap<&'static str, Statement>>,
    /// Held while a statement is in flight where a pooler may be in between: the pooler could deliver the reply of a pipelined statement
    /// to another client.
    pub exclusive: tokio::sync::Mutex<()>,
    /// Notified when a caller abandoned a statement behind which no other may be sent: the connection has to end.
    pub abandoned: Arc<Notify>,
    /// Notified when the driver gives up a silent connection that has to stay open until its statement is cancelled.
    pub given_up: Arc<Notify>,
    pub options: Arc<Options>,
}

impl PgSession {
    pub fn new(state: SessionState) -> Self {
        PgSession(Arc::new(state))
    }

    /// The number of this connection.
    pub fn epoch(&self) -> i32 {
        self.0.epoch
    }

    pub fn is_closed(&self) -> bool {
        self.0.in_flight.is_closed() || self.0.client.is_closed()
    }

    /// Whether its statements are prepared, and may be pipelined.
    pub fn is_prepared(&self) -> bool {
        self.0.prepared.get().is_some()
    }

    pub fn downgrade(&self) -> WeakSession {
        WeakSession(Arc::downgrade(&self.0))
    }

    /// Runs one statement and returns its rows. Statements are sent in the order of the calls.
    pub async fn rows(&self, sql: &PgStatement, params: &[Param<'_>]) -> Result<Vec<Row>, Failure> {
        let SessionState { client, prepared, options, connection, .. } = &*self.0;
        let in_flight = self.begin().await?;
        let reply = match prepared.get().and_then(|all| all.get(sql.text)) {
            Some(statement) => {
                let reply = connection.send_now(client.query(statement, params)).await;
                reply.map_err(|error| self.failure(&error))
            }
            None => {
                let text = sql.text.replace("@S", &options.schema);
                let typed: Vec<_> = params.iter().copied().zip(sql.types.iter().cloned()).collect();
                self.reply(client.query_typed(&text, &typed)).await
            }
        };
        in_flight.answered();
        reply
    }

    /// The reply, or an error as soon as the driver gives up the connection.
    async fn reply<T>(
        &self,
        reply: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            reply = reply => reply.map_err(|error| self.failure(&error)),
            () = self.0.given_up.notified() => {
                Err(Failure::NoReply(format!("{} sent no reply", self.0.options.server)))
            }
        }
    }

    fn failure(&self, error: &tokio_postgres::Error) -> Failure {
        Failure::of_request(error, &self.0.options.server.to_string())
    }

    /// Begins a statement: pipelined behind others, or, where there may be a pooler, after their replies.
    async fn begin(&self) -> Result<InFlightStatement<'_>, Failure> {
        let exclusive = match self.0.prepared.get() {
            Some(_) => None,
            None => Some(self.0.exclusive.lock().await),
        };
        // The statement before this one may have been abandoned meanwhile.
        if self.0.in_flight.is_closed() {
            return Err(Failure::ConnectionEnded);
        }
        Ok(InFlightStatement { session: &self.0, request: Some(self.0.in_flight.begin()), exclusive })
    }

    /// Runs statements that return no rows.
    pub async fn run(&self, text: &str) -> Result<(), Failure> {
        let in_flight = self.begin().await?;
        let done = self.reply(self.0.client.batch_execute(text)).await;
        in_flight.answered();
        done
    }

    /// Prepares the frequent statements, on a connection to the server itself. `statement_timeout` ends an abandoned statement that could
    /// not be cancelled.
    pub async fn prepare(&self) -> Result<(), Failure> {
        let timeout_ms = (self.0.options.timeout * 2).as_millis();
        let in_flight = self.begin().await?;
        let each = PREPARED.iter().map(|sql| async move {
            let text = sql.text.replace("@S", &self.0.options.schema);
            self.0.client.prepare_typed(&text, sql.types).await.map(|statement| (sql.text, statement))
        });
        let all = async {
            self.0.client.batch_execute(&format!("SET statement_timeout = {timeout_ms}")).await?;
            try_join_all(each).await
        };
        let all = self.reply(all).await;
        in_flight.answered();
        _ = self.0.prepared.set(all?.into_iter().collect());
        Ok(())
    }
}

/// A session that its callers may have dropped.
#[derive(Clone)]
pub(crate) struct WeakSession(Weak<SessionState>);

impl WeakSession {
    pub fn upgrade(&self) -> Option<PgSession> {
        self.0.upgrade().map(PgSession)
    }

    /// Whether the server replies to an empty query. Never ends where a pooler may be in between: nothing may be sent behind an abandoned
    /// statement there.
    pub async fn probe(self) -> bool {
        match self.0.upgrade() {
            Some(state) if state.prepared.get().is_some() => {
                let reply = state.client.simple_query("").await;
                reply.is_ok() || reply.is_err_and(|error| error.as_db_error().is_some())
            }
            _ => std::future::pending().await,
        }
    }
}

/// One statement in flight. If the caller drops it, the reply is still to come (see [`InFlight`]).
struct InFlightStatement<'a> {
    session: &'a SessionState,
    request: Option<Request<'a>>,
    exclusive: Option<tokio::sync::MutexGuard<'a, ()>>,
}

impl InFlightStatement<'_> {
    fn answered(mut self) {
        self.exclusive = None;
        if let Some(request) = self.request.take() {
            request.answered();
        }
    }
}

impl Drop for InFlightStatement<'_> {
    fn drop(&mut self) {
        if self.exclusive.is_some() {
            // Nothing may be sent behind it: the connection ends before the next caller locks `exclusive`.
            self.session.in_flight.close();
            self.session.abandoned.notify_one();
        }
    }
}

/// One value of the first row. Returns an error, and never panics, whatever the server sends.
pub(crate) fn first<T: FromSqlOwned>(rows: &[Row], at: usize) -> Result<T, Failure> {
    let value = rows.first().and_then(|row| row.try_get(at).ok());
    value.ok_or_else(Failure::unexpected_reply)
}
