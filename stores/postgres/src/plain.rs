//! Conditional writes of the database itself, which often make a lock unnecessary.
//!
//! - [`update`]: read, compute, write, and begin again if another client was quicker, by a version column.
//! - [`claim`]: only the first caller succeeds, by a unique key.
//! - [`next_job`]: each job to one worker, by `FOR UPDATE SKIP LOCKED`, with a fence for what it writes elsewhere.
//!
//! Names of tables and columns are quoted; conditions are SQL text of the caller, and must not come from untrusted input.

use std::future::Future;

use lockkeeper_core::{Error, Fence, Result};
use tokio_postgres::types::ToSql;
use tokio_postgres::{GenericClient, Row, Transaction};

use crate::codec;
use crate::error::Failure;
use crate::session::first;
use crate::statements::NEXT_FENCE;
use crate::store::PostgresStore;

/// A table whose rows have a key and a version: a number that every write raises.
#[derive(Clone, Copy, Debug)]
pub struct VersionedTable<'a> {
    /// Its name; a schema may stand before it, with a dot.
    pub name: &'a str,
    /// The column of the key.
    pub key: &'a str,
    /// The column of the version, a bigint.
    pub version: &'a str,
}

/// One column to write, and its new value.
pub type ColumnValue<'a> = (&'a str, Box<dyn ToSql + Sync + Send>);

/// How often [`update`] begins again before it gives up.
pub const TRIES: usize = 20;

/// Reads a row, lets `compute` return the columns to write, and writes them if the row still has the version that was read; else it begins
/// again. `compute` returns no columns to leave the row as it is. Returns whether the row was written.
///
/// # Errors
/// [`Error::Invalid`] if there is no such row, [`Error::Unavailable`] if other clients were quicker
/// [`TRIES`] times, [`Error::Unknown`] if the connection broke and it may have happened.
pub async fn update<'v, C: GenericClient, F: Future<Output = Result<Vec<ColumnValue<'v>>>>>(
    db: &C,
    table: VersionedTable<'_>,
    key: &(dyn ToSql + Sync),
    compute: impl Fn(Row) -> F,
) -> Result<bool> {
    let (name, at, version) = (quote(table.name), quote(table.key), quote(table.version));
    let read = format!("SELECT *, {version} AS \"lockkeeper version\" FROM {name} WHERE {at} = $1");
    for _ in 0..TRIES {
        let Some(row) = db.query_opt(&read, &[key]).await.map_err(to_error)? else {
            return Err(Error::invalid(format!("there is no such row in {}", table.name)));
        };
        let read_version: i64 = row.try_get("lockkeeper version").map_err(|_| {
            Error::invalid(format!("the version column {} of {} is no bigint", table.version, table.name))
        })?;
        let values = compute(row).await?;
        if values.is_empty() {
            return Ok(false);
        }
        let set: Vec<String> = values
            .iter()
            .enumerate()
            .map(|(i, (column, _))| format!("{} = ${}", quote(column), i + 3))
            .collect();
        let write = format!(
            "UPDATE {name} SET {}, {version} = {version} + 1 WHERE {at} = $1 AND {version} = $2",
            set.join(", ")
        );
        let mut params: Vec<&(dyn ToSql + Sync)> = vec![key, &read_version];
        params.extend(values.iter().map(|(_, value)| &**value as &(dyn ToSql + Sync)));
        if db.execute(&write, &params).await.map_err(to_error)? == 1 {
            return Ok(true);
        }
    }
    Err(Error::Unavailable(format!(
        "other clients were quicker {TRIES} times: the row of {} is too contended",
        table.name
    )))
}

/// Claims a key that only the first may have: `INSERT … ON CONFLICT DO NOTHING`. True for the first caller; false for all others,
/// and for the first when it claims again.
///
/// # Errors
/// [`Error::Unknown`] if the connection broke and it may have happened: look whether the row is yours.
pub async fn claim<C: GenericClient>(
    db: &C,
    table: &str,
    values: &[(&str, &(dyn ToSql + Sync))],
) -> Result<bool> {
    let columns: Vec<String> = values.iter().map(|(column, _)| quote(column)).collect();
    let placeholders: Vec<String> = (1..=values.len()).map(|i| format!("${i}")).collect();
    let insert = format!(
        "INSERT INTO {} ({}) VALUES ({}) ON CONFLICT DO NOTHING",
        quote(table),
        columns.join(", "),
        placeholders.join(", ")
    );
    let params: Vec<&(dyn ToSql + Sync)> = values.iter().map(|(_, value)| *value).collect();
    Ok(db.execute(&insert, &params).await.map_err(to_error)? == 1)
}

/// A job that is yours until the transaction ends.
#[derive(Debug)]
pub struct ClaimedJob {
    /// Its row.
    pub row: Row,
    /// For what you write elsewhere on its behalf: higher than that of every worker that had the job before.
    pub fence: Fence,
}

/// The next job that no other worker has, in the order of `order`: `SELECT … FOR UPDATE SKIP LOCKED LIMIT 1`. It is yours until the
/// transaction ends: mark it done in the same transaction. `ready` is a condition such as `"done_at IS NULL"`.
///
/// # Errors
/// Any error of the database; then the transaction cannot go on.
pub async fn next_job(
    store: &PostgresStore,
    tx: &Transaction<'_>,
    table: &str,
    ready: &str,
    order: &str,
) -> Result<Option<ClaimedJob>> {
    let text = format!(
        "SELECT * FROM {} WHERE {ready} ORDER BY {} LIMIT 1 FOR UPDATE SKIP LOCKED",
        quote(table),
        quote(order)
    );
    let Some(row) = tx.query_opt(&text, &[]).await.map_err(to_error)? else { return Ok(None) };
    // Drawn after the row was locked: every worker that had it before has a lower one.
    let rows = store.parts.connection.rows(&NEXT_FENCE, &[]).await?;
    let fence = codec::fence(first(&rows, 0)?)?;
    Ok(Some(ClaimedJob { row, fence }))
}

fn to_error(error: tokio_postgres::Error) -> Error {
    Failure::of_request(&error, "the database").into()
}

/// A name as a quoted SQL identifier; a dot separates schema and table.
fn quote(name: &str) -> String {
    let parts: Vec<String> =
        name.split('.').map(|part| format!("\"{}\"", part.replace('"', "\"\""))).collect();
    parts.join(".")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_name_cannot_become_sql() {
        assert_eq!(super::quote("app.jobs"), r#""app"."jobs""#);
        assert_eq!(super::quote(r#"a"; DROP TABLE b"#), r#""a""; DROP TABLE b""#);
    }
}
