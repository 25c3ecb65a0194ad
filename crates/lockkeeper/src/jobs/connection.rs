//! The connection of a worker, which is opened again when it has ended.

use std::sync::Arc;

use lockkeeper_core::{Error, Result};
use lockkeeper_postgres::tokio_postgres::types::{ToSql, Type};
use lockkeeper_postgres::tokio_postgres::{Client, Row};
use lockkeeper_postgres::{Options, connect_to};
use tokio::sync::Mutex;

use super::error::to_error;

/// One parameter of a statement, and its type.
pub(super) type JobParameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// The connection to the database of the jobs.
pub(super) struct JobConnection {
    options: Options,
    client: Mutex<Option<Arc<Client>>>,
}

impl JobConnection {
    pub fn new(options: Options, client: Client) -> JobConnection {
        JobConnection { options, client: Mutex::new(Some(Arc::new(client))) }
    }

    async fn client(&self) -> Result<Arc<Client>> {
        let mut current = self.client.lock().await;
        if let Some(client) = current.as_ref().filter(|client| !client.is_closed()) {
            return Ok(client.clone());
        }
        let client = Arc::new(connect_to(&self.options).await?);
        *current = Some(client.clone());
        Ok(client)
    }

    /// The rows of a statement that is a transaction of its own.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the server did not answer: it may have carried the statement out.
    pub async fn rows(&self, sql: &str, parameters: &[JobParameter<'_>]) -> Result<Vec<Row>> {
        let client = self.client().await?;
        match tokio::time::timeout(self.options.timeout, client.query_typed(sql, parameters)).await {
            Ok(answer) => answer.map_err(|error| to_error(&error, true)),
            Err(_) => {
                // A connection that is silent is of no more use: the next statement opens another one.
                let mut current = self.client.lock().await;
                current.take_if(|current| Arc::ptr_eq(current, &client));
                Err(Error::Unknown(format!("PostgreSQL did not answer within {:?}", self.options.timeout)))
            }
        }
    }
}

impl std::fmt::Debug for JobConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JobConnection({:?})", self.options)
    }
}
