//! The parts that the example programs share: the directory with their two SQLite files, locks and data.

use std::path::PathBuf;

use lockkeeper_fenced::sqlite::rusqlite::{self, Connection};

/// Where an example keeps its files: the directory `LOCKKEEPER_EXAMPLES`, or one below the temporary directory.
///
/// # Panics
/// If the directory cannot be made.
pub fn directory() -> PathBuf {
    let named = std::env::var_os("LOCKKEEPER_EXAMPLES").map(PathBuf::from);
    let dir = named.unwrap_or_else(|| std::env::temp_dir().join("lockkeeper-examples"));
    std::fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    dir
}

/// The URL of the store that the example's locks are kept in: `LOCKKEEPER_STORE`, or a SQLite file in [`directory`].
pub fn store_url() -> String {
    let named = std::env::var("LOCKKEEPER_STORE").ok().filter(|url| !url.is_empty());
    named.unwrap_or_else(|| format!("sqlite:{}", directory().join("locks.db").display()))
}

/// The example's own data: a SQLite database that `schema` prepares.
///
/// # Errors
/// If the file cannot be opened or written.
pub fn database(name: &str, schema: &str) -> rusqlite::Result<Connection> {
    let db = Connection::open(directory().join(name))?;
    db.busy_timeout(std::time::Duration::from_secs(10))?;
    // A committed transaction survives a power cut, and the marks of the fences with it.
    db.execute_batch(&format!("PRAGMA synchronous = EXTRA; {schema}"))?;
    Ok(db)
}
