//! Guard rows: the marks of resources in a table of the caller's database.

use lockkeeper_core::{Error, Fence, Result};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, GenericClient, Row, Statement, Transaction};

use super::error::to_error;
use crate::sql::{FenceTable, parameter};
use crate::verdict;

/// A table of guard rows, one for each resource, that is checked and raised in your own transactions.
#[derive(Clone, Debug, Default)]
pub struct Fences {
    table: FenceTable,
    prepared: Option<Statement>,
}

impl Fences {
    /// The guard rows in this table: `name`, or `schema.name`. [`Fences::default`] is `lockkeeper_fence`, wherever the `search_path` leads.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be the name of a table.
    pub fn new(table: &str) -> Result<Self> {
        Ok(Fences { table: FenceTable::new(table)?, prepared: None })
    }

    /// The SQL that makes the table.
    pub fn table_sql(&self) -> String {
        self.table.create_sql()
    }

    /// The name of the table, quoted for SQL.
    pub(super) fn name(&self) -> &str {
        self.table.name()
    }

    /// Makes the table if it is missing. Several sessions may do so at once, each in a transaction or not.
    ///
    /// # Errors
    /// [`Error::Denied`] with the SQL that a role with the rights has to run.
    pub async fn install(&self, client: &impl GenericClient) -> Result<()> {
        if self.is_installed(client).await? {
            return Ok(());
        }
        let sql = self.table_sql();
        self.create(client, &unless_made_meanwhile(&sql)).await?;
        if self.is_installed(client).await? {
            return Ok(());
        }
        // The name belongs to something else, such as a type: PostgreSQL says to what.
        self.create(client, &sql).await
    }

    async fn create(&self, client: &impl GenericClient, sql: &str) -> Result<()> {
        client.batch_execute(sql).await.map_err(|e| match to_error(&e, false) {
            Error::Denied(text) => Error::Denied(format!(
                "{text}. A role with the rights must run this SQL: {};",
                self.table_sql()
            )),
            other => other,
        })
    }

    async fn is_installed(&self, client: &impl GenericClient) -> Result<bool> {
        let exists = "SELECT to_regclass($1) IS NOT NULL";
        let row = client
            .query_typed(exists, &[(&self.name(), Type::TEXT)])
            .await
            .map_err(|e| to_error(&e, false))?;
        Ok(row.first().and_then(|row| row.try_get(0).ok()) == Some(true))
    }

    /// The same, with its statement prepared on this connection: quicker, for transactions of this connection only. Not behind a
    /// pooler that gives each transaction another one.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the table is missing.
    pub async fn prepared(mut self, client: &Client) -> Result<Self> {
        let statement = client.prepare_typed(self.table.apply_sql(), &[Type::TEXT, Type::INT8]).await;
        self.prepared = Some(statement.map_err(|e| self.missing(to_error(&e, false)))?);
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
        let number = parameter(fence);
        let rows = match &self.prepared {
            Some(statement) => tx.query(statement, &[&text(resource)?, &number]).await,
            None => {
                let parameters: [(&(dyn ToSql + Sync), Type); 2] =
                    [(&text(resource)?, Type::TEXT), (&number, Type::INT8)];
                tx.query_typed(self.table.apply_sql(), &parameters).await
            }
        };
        let rows = rows.map_err(|e| self.missing(to_error(&e, false)))?;
        verdict("postgres", fence, mark(&rows)?)
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

/// `CREATE TABLE IF NOT EXISTS` fails if another session makes the table at the same time: in a unique index of the catalogue, or because the
/// type of the table's rows is there. In a block with a handler the caller's transaction goes on.
fn unless_made_meanwhile(create: &str) -> String {
    let made = "unique_violation OR duplicate_object OR duplicate_table";
    let block = format!("BEGIN {create}; EXCEPTION WHEN {made} THEN NULL; END");
    // The name of the table may contain any tag.
    let mut tag = "$do$".to_owned();
    while block.contains(&tag) {
        tag.insert(1, '_');
    }
    format!("DO {tag}{block}{tag}")
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
