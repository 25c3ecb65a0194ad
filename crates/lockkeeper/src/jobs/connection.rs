//! The connection of a worker, which is opened again when it has ended.

use std::sync::Arc;

use lockkeeper_core::{Error, Result};
use lockkeeper_postgres::tokio_postgres::types::{ToSql, Type};
use lockkeeper_postgres::tokio_postgres::{self, Client, Row};
use lockkeeper_postgres::{Options, connect_to, has_own_server_process};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::error::to_error;
use super::prepared::{PreparedFault, PreparedStatements};

/// One parameter of a statement, and its type.
pub(super) type JobParameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// On a connection of its own the worker prefers the index on `lk_run_at`. With the default of 4 and statistics of before the last rows
/// came, the planner lets each claim of a batch read and sort all rows that are due.
const PREFER_INDEXES: &str = "SET random_page_cost = 1";

/// The connection to the database of the jobs.
pub(super) struct JobConnection {
    options: Options,
    session: Mutex<Option<Arc<JobSession>>>,
}

/// An open connection.
struct JobSession {
    client: Client,
    /// `None` where a pooler may be in between: the next statement may come to another server process, which has no or other prepared
    /// statements.
    prepared: Option<PreparedStatements>,
}

impl JobSession {
    async fn new(client: Client) -> Result<JobSession, tokio_postgres::Error> {
        let own = has_own_server_process(&client).await?;
        if own {
            client.batch_execute(PREFER_INDEXES).await?;
        }
        Ok(JobSession { client, prepared: own.then(PreparedStatements::default) })
    }

    /// The rows of a statement, prepared where that is possible.
    async fn frequent_rows(&self, sql: &str, parameters: &[JobParameter<'_>]) -> Result<Vec<Row>> {
        let Some(prepared) = &self.prepared else { return self.rows(sql, parameters).await };
        let types: Vec<Type> = parameters.iter().map(|(_, kind)| kind.clone()).collect();
        let fault = match prepared.get(&self.client, sql, &types).await {
            Ok(None) => return self.rows(sql, parameters).await,
            Ok(Some(statement)) => {
                let values: Vec<_> = parameters.iter().map(|(value, _)| *value).collect();
                match self.client.query(&statement, &values).await {
                    Ok(rows) => return Ok(rows),
                    Err(error) => PreparedFault::of(&error).ok_or_else(|| to_error(&error, true))?,
                }
            }
            // Nothing but the preparation was sent.
            Err(error) => PreparedFault::of(&error).ok_or_else(|| to_error(&error, false))?,
        };
        // The server has rolled the statement back as a whole.
        tracing::debug!(?fault, "a prepared statement is of no more use; sending it as text");
        prepared.forget(fault);
        self.rows(sql, parameters).await
    }

    async fn rows(&self, sql: &str, parameters: &[JobParameter<'_>]) -> Result<Vec<Row>> {
        self.client.query_typed(sql, parameters).await.map_err(|error| to_error(&error, true))
    }
}

impl JobConnection {
    /// # Errors
    /// [`Error::Unavailable`] if the connection has broken meanwhile.
    pub async fn new(options: Options, client: Client) -> Result<JobConnection> {
        let session = Arc::new(session(&options, client).await?);
        Ok(JobConnection { options, session: Mutex::new(Some(session)) })
    }

    async fn session(&self) -> Result<Arc<JobSession>> {
        let mut current = self.session.lock().await;
        if let Some(session) = current.as_ref().filter(|session| !session.client.is_closed()) {
            return Ok(session.clone());
        }
        let session = Arc::new(session(&self.options, connect_to(&self.options).await?).await?);
        *current = Some(session.clone());
        Ok(session)
    }

    /// The rows of a statement that is a transaction of its own.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the server did not answer: it may have carried the statement out.
    pub async fn rows(&self, sql: &str, parameters: &[JobParameter<'_>]) -> Result<Vec<Row>> {
        let session = self.session().await?;
        self.reply(&session, session.rows(sql, parameters)).await
    }

    /// The same for a statement that workers send again and again.
    pub async fn frequent_rows(&self, sql: &str, parameters: &[JobParameter<'_>]) -> Result<Vec<Row>> {
        let session = self.session().await?;
        self.reply(&session, session.frequent_rows(sql, parameters)).await
    }

    async fn reply(
        &self,
        session: &Arc<JobSession>,
        reply: impl Future<Output = Result<Vec<Row>>>,
    ) -> Result<Vec<Row>> {
        match timeout(self.options.timeout, reply).await {
            Ok(reply) => reply,
            Err(_) => {
                // A connection that is silent is of no more use: the next statement opens another one.
                let mut current = self.session.lock().await;
                current.take_if(|current| Arc::ptr_eq(current, session));
                Err(Error::Unknown(format!("PostgreSQL did not answer within {:?}", self.options.timeout)))
            }
        }
    }
}

/// A connection that is ready for the statements of workers.
async fn session(options: &Options, client: Client) -> Result<JobSession> {
    match timeout(options.timeout, JobSession::new(client)).await {
        Ok(session) => session.map_err(|error| to_error(&error, false)),
        Err(_) => Err(Error::Unavailable(format!("PostgreSQL did not answer within {:?}", options.timeout))),
    }
}

impl std::fmt::Debug for JobConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JobConnection({:?})", self.options)
    }
}
