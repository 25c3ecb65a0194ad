//! SQLite: a guard row in your own database, checked and raised in your own transaction.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, IgnorePoison, Result};
// The crate of the transactions.
pub use rusqlite;
use rusqlite::{Connection, ErrorCode, OptionalExtension, Params, Transaction};

use crate::{Fenced, GuardedValue, verdict};

/// The guard table, as [`apply`] makes it when it is missing.
pub const TABLE: &str = "CREATE TABLE IF NOT EXISTS lockkeeper_fence (resource TEXT PRIMARY KEY, fence INTEGER NOT NULL, value BLOB)";

/// The mark that is returned is the higher one of the two. If it is not the one that was presented, nothing has changed.
const APPLY: &str = "INSERT INTO lockkeeper_fence (resource, fence) VALUES (?1, ?2) \
    ON CONFLICT (resource) DO UPDATE SET fence = max(fence, excluded.fence) RETURNING fence";
const PUT: &str = "INSERT INTO lockkeeper_fence (resource, fence, value) VALUES (?1, ?2, ?3) \
    ON CONFLICT (resource) DO UPDATE SET value = iif(excluded.fence >= fence, excluded.value, value), \
    fence = max(fence, excluded.fence) RETURNING fence";
const READ: &str = "SELECT fence, value FROM lockkeeper_fence WHERE resource = ?1";

/// Checks the fence, and raises the mark of `resource` to it, in your transaction: what you write there is committed with the mark, or
/// not at all. From here on no other connection writes to the database until the transaction ends.
///
/// The guard table is made if it is missing.
///
/// # Errors
/// [`Error::Stale`] if a higher fence was seen: roll back. [`Error::Unavailable`] if the database is busy: roll back and try again.
pub fn apply(tx: &Transaction<'_>, resource: &str, fence: Fence) -> Result<()> {
    let mark = marked(tx, APPLY, (resource, number(fence)))?;
    verdict("sqlite", fence, mark)
}

fn number(fence: Fence) -> i64 {
    i64::try_from(fence.get()).expect("fences are below 2^53")
}

/// Runs a statement that returns the mark.
fn marked(sql: &Connection, text: &str, params: impl Params + Copy) -> Result<Fence> {
    let run = || sql.prepare_cached(text)?.query_row(params, |row| row.get(0));
    let found = match run() {
        Err(e) if missing(&e) => sql.execute_batch(TABLE).and_then(|()| run()),
        answer => answer,
    };
    crate::fence(found.map_err(fault)?)
}

fn missing(e: &rusqlite::Error) -> bool {
    e.to_string().contains("no such table: lockkeeper_fence")
}

/// Nothing has happened, unless the disk failed in the middle of a commit.
fn fault(e: rusqlite::Error) -> Error {
    let text = format!("SQLite says {e}");
    match e.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Error::Unavailable(text),
        Some(ErrorCode::DiskFull) => Error::Limited(text),
        Some(ErrorCode::SystemIoFailure) => Error::Unknown(text),
        Some(
            ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied,
        ) => Error::Denied(text),
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => Error::Invalid(text),
        _ => Error::Unavailable(text),
    }
}

/// Small values in a SQLite file, each with its mark: for those who have no table of their own.
#[derive(Clone, Debug)]
pub struct SqliteFenced {
    sql: Arc<Mutex<Connection>>,
}

impl SqliteFenced {
    /// The values in this file, which is made if it is missing. A write is on the disk when it is reported.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Denied`] or [`Error::Invalid`] if it cannot be opened or is no database.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let sql = Connection::open(path).map_err(fault)?;
        sql.busy_timeout(Duration::from_secs(10)).map_err(fault)?;
        // Not FULL: where the journal is a file that is removed, the removal would not be on the disk yet.
        sql.execute_batch(&format!("PRAGMA synchronous = EXTRA; {TABLE}")).map_err(fault)?;
        Ok(SqliteFenced { sql: Arc::new(Mutex::new(sql)) })
    }

    /// On a thread that may block. Given up, it goes on to its end, which is as good as any: it checks when it writes.
    async fn on<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let sql = self.sql.clone();
        let done = tokio::task::spawn_blocking(move || work(&sql.lock().ignore_poison())).await;
        done.unwrap_or_else(|e| Err(Error::Unknown(format!("the thread that wrote has ended: {e}"))))
    }

    async fn write(&self, resource: &str, fence: Fence, value: Option<Vec<u8>>) -> Result<()> {
        let resource = resource.to_owned();
        let mark = self.on(move |sql| marked(sql, PUT, (&resource, number(fence), &value))).await?;
        verdict("sqlite", fence, mark)
    }
}

#[async_trait]
impl Fenced for SqliteFenced {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.write(resource, fence, Some(value.to_vec())).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.write(resource, fence, None).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let resource = resource.to_owned();
        let row = self.on(move |sql| {
            let mut read = sql.prepare_cached(READ).map_err(fault)?;
            read.query_row([resource], |row| Ok((row.get(0)?, row.get(1)?))).optional().map_err(fault)
        });
        let Some((fence, value)) = row.await? else { return Ok(None) };
        Ok(Some(GuardedValue { fence: crate::fence(fence)?, value }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new file has a rollback journal, and a commit is the removal of that: until the directory is synced, a power cut brings the
    /// journal back, and with it what was there before. FULL does not sync the directory then, EXTRA does.
    #[test]
    fn what_was_told_is_on_the_disk_in_every_journal_mode() {
        let dir = std::env::temp_dir().join(format!("lockkeeper-extra-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        for mode in ["delete", "wal"] {
            let fenced = SqliteFenced::open(dir.join("data.db")).unwrap();
            let sql = fenced.sql.lock().unwrap();
            let text = |pragma: &str| sql.query_row(pragma, [], |row| row.get::<_, String>(0)).unwrap();
            let is: i64 = sql.query_row("PRAGMA synchronous", [], |row| row.get(0)).unwrap();
            assert_eq!((text("PRAGMA journal_mode").as_str(), is), (mode, 3));
            text("PRAGMA journal_mode = WAL");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
