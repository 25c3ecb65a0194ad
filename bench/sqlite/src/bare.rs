//! The baseline: a row for each lock, one INSERT to acquire it and one DELETE to release it, each durable when it returns.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, params};

pub fn open(path: &Path) -> Connection {
    let sql = Connection::open(path).expect("a database");
    sql.busy_timeout(Duration::from_secs(30)).expect("a time-out");
    let mode: String = sql.query_row("PRAGMA journal_mode=WAL", [], |row| row.get(0)).expect("an answer");
    assert_eq!(mode, "wal");
    let table = "PRAGMA synchronous=FULL; CREATE TABLE IF NOT EXISTS bare(name TEXT PRIMARY KEY, attempt BLOB NOT NULL, \
                 fence INTEGER NOT NULL, expires INTEGER NOT NULL, holder TEXT NOT NULL) WITHOUT ROWID";
    sql.execute_batch(table).expect("a table");
    sql
}

/// Acquires and releases a lock.
pub fn cycle(sql: &Connection, name: &str, attempt: u64) {
    take(sql, name, attempt);
    give(sql, name, attempt);
}

pub fn take(sql: &Connection, name: &str, attempt: u64) {
    let attempt = u128::from(attempt).to_be_bytes();
    let fence =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_micros() as i64;
    let row = params![name, attempt, fence, fence + 30_000_000, r#"{"host":"bench","pid":1}"#];
    let mut take = sql.prepare_cached("INSERT INTO bare VALUES(?1, ?2, ?3, ?4, ?5)").expect("a statement");
    assert_eq!(take.execute(row).expect("it was free"), 1);
}

pub fn give(sql: &Connection, name: &str, attempt: u64) {
    let attempt = u128::from(attempt).to_be_bytes();
    let mut give =
        sql.prepare_cached("DELETE FROM bare WHERE name = ?1 AND attempt = ?2").expect("a statement");
    assert_eq!(give.execute(params![name, attempt]).expect("it was held"), 1);
}
