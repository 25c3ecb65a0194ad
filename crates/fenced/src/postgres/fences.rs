use lockkeeper_core::{Error, Fence, Result};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, GenericClient, Row, Statement, Transaction};

use super::fault::fault;
use crate::verdict;

/// A table of guard rows, one for each resource, that is checked and raised in your own transactions.
#[derive(Clone, Debug)]
pub struct Fences {
    pub(super) table: String,
    apply: String,
    prepared: Option<Statement>,
}

impl Default for Fences {
    fn default() -> Self {
        Fences::new("lockkeeper_fence").expect("a good name")
    }
}

impl Fences {
    /// The guard rows in this table: `name`, or `schema.name`. [`Fences::default`] is `lockkeeper_fence`, wherever the `search_path` leads.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be the name of a table.
    pub fn new(table: &str) -> Result<Self> {
        let parts: Vec<&str> = table.split('.').collect();
        if parts.len() > 2
            || parts.iter().any(|part| part.is_empty() || part.len() > 63 || part.contains('\0'))
        {
            return Err(Error::invalid(format!("{table:?} is no name of a table: NAME or SCHEMA.NAME")));
        }
        let quoted: Vec<String> =
            parts.iter().map(|part| format!("\"{}\"", part.replace('"', "\"\""))).collect();
        let table = quoted.join(".");
        // What comes back is the higher one of the two. Whoever else has the row is waited for, and then counts.
        let apply = format!(
            "INSERT INTO {table} AS f (resource, fence) VALUES ($1, $2) \
             ON CONFLICT (resource) DO UPDATE SET fence = greatest(f.fence, excluded.fence) RETURNING f.fence"
        );
        Ok(Fences { table, apply, prepared: None })
    }

    /// The SQL that makes the table. Half of each page is left free, so that raising a mark changes no index.
    pub fn table_sql(&self) -> String {
        format!(
            "CREATE TABLE IF NOT EXISTS {} (resource text COLLATE \"C\" PRIMARY KEY, fence bigint NOT NULL, value bytea) \
             WITH (fillfactor = 50)",
            self.table
        )
    }

    /// Makes the table if it is missing.
    ///
    /// # Errors
    /// [`Error::Denied`] with the SQL that somebody who may is to run.
    pub async fn install(&self, client: &impl GenericClient) -> Result<()> {
        let sql = self.table_sql();
        let there = "SELECT to_regclass($1) IS NOT NULL";
        let row =
            client.query_typed(there, &[(&self.table, Type::TEXT)]).await.map_err(|e| fault(&e, false))?;
        if row.first().and_then(|row| row.try_get(0).ok()) == Some(true) {
            return Ok(());
        }
        client.batch_execute(&sql).await.map_err(|e| match fault(&e, false) {
            Error::Denied(text) => {
                Error::Denied(format!("{text}. Let somebody who may run this SQL: {sql};"))
            }
            other => other,
        })
    }

    /// The same, with its statement prepared on this connection: quicker, for transactions of this connection only. Not behind a
    /// pooler that gives each transaction another one.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the table is missing.
    pub async fn prepared(mut self, client: &Client) -> Result<Self> {
        let statement = client.prepare_typed(&self.apply, &[Type::TEXT, Type::INT8]).await;
        self.prepared = Some(statement.map_err(|e| self.missing(fault(&e, false)))?);
        Ok(self)
    }

    /// Checks the fence, and raises the mark of `resource` to it, in your transaction: what you write there is committed with the mark,
    /// or not at all. Other writers to the resource wait until the transaction ends.
    ///
    /// It is one statement. Sent together with yours (`tokio::try_join!`) it costs no round trip of its own.
    ///
    /// # Errors
    /// [`Error::Stale`] if a higher fence was seen: roll back. Any other error: the transaction cannot go on.
    pub async fn apply(&self, tx: &Transaction<'_>, resource: &str, fence: Fence) -> Result<()> {
        let number = number(fence);
        let rows = match &self.prepared {
            Some(statement) => tx.query(statement, &[&text(resource)?, &number]).await,
            None => {
                tx.query_typed(&self.apply, &[(&text(resource)?, Type::TEXT), (&number, Type::INT8)]).await
            }
        };
        let rows = rows.map_err(|e| self.missing(fault(&e, false)))?;
        verdict(fence, mark(&rows)?)
    }

    /// Says what to do about a table that is not there.
    pub(super) fn missing(&self, error: Error) -> Error {
        match error {
            Error::Invalid(text) if text.contains("(42P01)") => Error::Invalid(format!(
                "{text}. Call Fences::install once, or run this SQL: {};",
                self.table_sql()
            )),
            other => other,
        }
    }
}

pub(super) fn number(fence: Fence) -> i64 {
    i64::try_from(fence.get()).expect("fences are below 2^53")
}

/// PostgreSQL has no text with a zero byte in it.
pub(super) fn text(resource: &str) -> Result<&str> {
    if resource.contains('\0') {
        return Err(Error::invalid("a resource with a zero byte in its name cannot be kept in PostgreSQL"));
    }
    Ok(resource)
}

pub(super) fn mark(rows: &[Row]) -> Result<Fence> {
    let mark = rows.first().and_then(|row| row.try_get(0).ok());
    crate::fence(mark.ok_or_else(|| Error::Unknown("PostgreSQL gave an answer that makes no sense".into()))?)
}
