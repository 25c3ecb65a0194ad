//! Tables that check by themselves: a trigger refuses every UPDATE and DELETE that presents an older fence than the row has seen, and
//! every INSERT that brings back a deleted row with one, whatever client sends it.
//!
//! A client presents its fence by writing it into the column, or for the whole transaction by `SET LOCAL lockkeeper.fence = '…'`,
//! which is the way for DELETE. A write that presents none is refused as well, unless that was allowed at [`install`].

mod find;
mod registry;
mod script;
mod status;

use find::KeyKind;
pub use find::{GuardedTable, KeyColumn, find};
pub use status::{Status, TriggerState, status};

use lockkeeper_core::{Error, Result};
use tokio_postgres::{Client, GenericClient, Transaction};

use super::error::to_error;

/// The table to guard, and how.
#[derive(Clone, Debug)]
pub struct TableGuardSpec {
    /// The table, as in SQL: `orders`, `sales.orders`, `"Orders"`.
    pub table: String,
    /// Its column for the fence, a `bigint`.
    pub column: String,
    /// The columns that name a row. Empty: its primary key.
    pub key: Vec<String>,
    /// Whether UPDATE and DELETE without any fence are let through.
    pub allow_unfenced: bool,
}

/// The SQL of [`install`], for a role that has the rights to run it.
pub fn install_sql(guarded: &GuardedTable) -> String {
    script::install(guarded)
}

/// Guards a table. A second call replaces the settings of the first.
///
/// # Errors
/// [`Error::Invalid`] or [`Error::Unsupported`] if the table cannot be guarded, with what to do; [`Error::Denied`] if that takes more rights
/// than the user has: then a role that has them runs [`install_sql`].
pub async fn install(client: &mut Client, guarded: &GuardedTable) -> Result<()> {
    run(client, &script::install(guarded)).await
}

/// Removes the triggers, the function and the marks of deleted rows. The column stays: it is yours. `false`: there was nothing.
///
/// # Errors
/// As [`install`].
pub async fn uninstall(client: &mut Client, table: &str) -> Result<bool> {
    let Some(found) = registry::registered(client, table).await? else { return Ok(false) };
    run(client, &script::uninstall(&found.name, &found.function)).await?;
    Ok(true)
}

async fn run(client: &mut Client, sql: &str) -> Result<()> {
    let tx = client.transaction().await.map_err(|e| to_error(&e, false))?;
    tx.batch_execute(sql).await.map_err(|e| to_error(&e, false))?;
    tx.commit().await.map_err(|e| to_error(&e, true))
}

/// Leaves only PostgreSQL's own functions and operators to be found, until the end of the transaction: in a schema of the session's
/// search_path another role may have made one that fits a call better.
async fn own_path(client: &Transaction<'_>) -> Result<()> {
    client.batch_execute("SET LOCAL search_path = pg_catalog, pg_temp").await.map_err(|e| to_error(&e, false))
}

/// One value of the first row.
async fn one<T>(client: &impl GenericClient, sql: &str, text: &str) -> Result<Option<T>>
where
    T: tokio_postgres::types::FromSqlOwned,
{
    let rows = client.query_typed(sql, &[(&text, tokio_postgres::types::Type::TEXT)]).await;
    let rows = rows.map_err(|e| to_error(&e, false))?;
    let value = rows.first().map(|row| row.try_get::<_, Option<T>>(0)).transpose();
    Ok(value.map_err(|e| Error::Unavailable(e.to_string()))?.flatten())
}
