//! SQLite: the laws, and the guard row in a transaction of the user's.
#![cfg(feature = "sqlite")]

use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::sqlite::rusqlite::{Connection, TransactionBehavior};
use lockkeeper_fenced::sqlite::{SqliteFenced, apply};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use lockkeeper_testkit::servers::TempDir;

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

struct Place(TempDir);

#[async_trait]
impl FencedHarness for Place {
    async fn start() -> Option<Self> {
        let place = Place(TempDir::new("sqlite"));
        // As most people have it, and quicker with many at once.
        let sql = Connection::open(place.address()).unwrap();
        sql.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(())).unwrap();
        Some(place)
    }

    fn address(&self) -> String {
        self.0.join("data.db").display().to_string()
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        Arc::new(SqliteFenced::open(address).unwrap())
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        Arc::new(Plain(address.to_owned()))
    }
}

/// What people do without a fence.
struct Plain(String);

impl Plain {
    fn open(&self) -> Connection {
        let sql = Connection::open(&self.0).unwrap();
        sql.busy_timeout(std::time::Duration::from_secs(10)).unwrap();
        sql.execute_batch("CREATE TABLE IF NOT EXISTS plain (name TEXT PRIMARY KEY, value BLOB)").unwrap();
        sql
    }
}

#[async_trait]
impl Fenced for Plain {
    async fn put(&self, resource: &str, _: Fence, value: &[u8]) -> Result<()> {
        self.open().execute("INSERT OR REPLACE INTO plain VALUES (?1, ?2)", (resource, value)).unwrap();
        Ok(())
    }

    async fn delete(&self, resource: &str, _: Fence) -> Result<()> {
        self.open().execute("DELETE FROM plain WHERE name = ?1", [resource]).unwrap();
        Ok(())
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let value =
            self.open().query_row("SELECT value FROM plain WHERE name = ?1", [resource], |row| row.get(0));
        Ok(value.ok().map(|value| GuardedValue { fence: Fence::MIN, value: Some(value) }))
    }
}

mod laws {
    use super::*;
    lockkeeper_testkit::fenced_laws!(Place);
}

/// A database of the user's, with nothing of ours in it.
fn orders(dir: &TempDir) -> Connection {
    let sql = Connection::open(dir.join("orders.db")).unwrap();
    let table = "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, state TEXT); \
                 INSERT OR IGNORE INTO orders VALUES (42, 'open')";
    sql.execute_batch(table).unwrap();
    sql
}

fn set(sql: &mut Connection, n: u64, state: &str) -> Result<()> {
    let tx = sql.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    apply(&tx, "orders/42", fence(n))?;
    tx.execute("UPDATE orders SET state = ?1 WHERE id = 42", [state]).unwrap();
    tx.commit().unwrap();
    Ok(())
}

fn state(sql: &Connection) -> String {
    sql.query_row("SELECT state FROM orders", [], |row| row.get(0)).unwrap()
}

#[test]
fn the_users_write_and_the_mark_are_committed_together_or_not_at_all() {
    let dir = TempDir::new("sqlite");
    let (mut a, mut b) = (orders(&dir), orders(&dir));
    set(&mut a, 5, "five").unwrap();
    set(&mut b, 7, "seven").unwrap();
    assert!(matches!(set(&mut a, 6, "late"), Err(Error::Stale { presented, seen })
        if (presented, seen) == (fence(6), fence(7))));
    assert_eq!(state(&a), "seven");
    // Rolled back, the mark is as it was: the next writer is not compared with a mark that was rolled back.
    {
        let tx = b.transaction().unwrap();
        apply(&tx, "orders/42", fence(9)).unwrap();
        tx.execute("UPDATE orders SET state = 'never'", []).unwrap();
    }
    set(&mut a, 8, "eight").unwrap();
    assert_eq!(state(&b), "eight");
    // Several resources, each once, in one transaction.
    let tx = a.transaction().unwrap();
    apply(&tx, "orders/1", fence(1)).unwrap();
    apply(&tx, "orders/42", fence(8)).unwrap();
    apply(&tx, "it's; DROP TABLE orders --", fence(3)).unwrap();
    tx.commit().unwrap();
    assert_eq!(state(&b), "eight");
}

#[test]
fn a_transaction_that_is_open_keeps_the_next_writer_out_until_it_ends() {
    let dir = TempDir::new("sqlite");
    let (mut a, mut b) = (orders(&dir), orders(&dir));
    set(&mut a, 5, "five").unwrap();
    b.busy_timeout(std::time::Duration::ZERO).unwrap();
    let tx = a.transaction().unwrap();
    apply(&tx, "orders/42", fence(6)).unwrap();
    let other = b.transaction().unwrap();
    assert!(matches!(apply(&other, "orders/42", fence(7)), Err(Error::Unavailable(_))), "it is busy");
    drop(other);
    tx.commit().unwrap();
    set(&mut b, 7, "seven").unwrap();
    assert!(matches!(set(&mut a, 6, "late"), Err(Error::Stale { .. })));
}

#[test]
fn a_damaged_mark_and_a_file_that_is_no_database_are_refused() {
    let dir = TempDir::new("sqlite");
    let mut sql = orders(&dir);
    set(&mut sql, 5, "five").unwrap();
    sql.execute_batch("UPDATE lockkeeper_fence SET fence = 9007199254740992").unwrap();
    assert!(matches!(set(&mut sql, 9, "x"), Err(Error::Invalid(text)) if text.contains("damaged")));
    assert_eq!(state(&sql), "five");
    std::fs::write(
        dir.join("text"),
        "this is no database, but long enough to be looked at as if it were one".repeat(20),
    )
    .unwrap();
    assert!(matches!(SqliteFenced::open(dir.join("text")), Err(Error::Invalid(_))));
    assert!(SqliteFenced::open(dir.join("no/such/dir.db")).is_err());
}

/// The table and its rows, without the words that only its creation needs.
fn dump(sql: &Connection) -> Vec<String> {
    let text = "SELECT sql || ';' FROM sqlite_schema WHERE sql IS NOT NULL UNION ALL SELECT 'INSERT INTO lockkeeper_fence VALUES(' || \
        quote(resource) || ',' || quote(fence) || ',' || quote(value) || ');' FROM lockkeeper_fence";
    let mut lines = sql.prepare(text).unwrap();
    let lines: Vec<String> =
        lines.query_map([], |row| row.get(0)).unwrap().map(|line| line.unwrap()).collect();
    lines.into_iter().map(|line| line.replace("IF NOT EXISTS ", "")).collect()
}

#[tokio::test]
async fn the_golden_guard_rows_are_read_and_written() {
    let golden = include_str!("golden/sqlite-fence.sql");
    let dir = TempDir::new("golden");
    let (old, new) = (dir.join("old.db"), dir.join("new.db"));
    Connection::open(&old).unwrap().execute_batch(golden).unwrap();
    let mut sql = Connection::open(&new).unwrap();
    let tx = sql.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    apply(&tx, "applied", fence(42)).unwrap();
    tx.commit().unwrap();
    let values = SqliteFenced::open(&new).unwrap();
    values.put("value", fence(42), b"the").await.unwrap();
    values.delete("deleted", fence(42)).await.unwrap();
    let mut written = dump(&sql);
    written[1..].sort();
    assert_eq!(written, golden.lines().collect::<Vec<_>>(), "the stored format has changed");

    let values = SqliteFenced::open(&old).unwrap();
    for (resource, value) in [("applied", None), ("deleted", None), ("value", Some(b"the".to_vec()))] {
        let expected = Some(GuardedValue { fence: fence(42), value });
        assert_eq!(values.read(resource).await.unwrap(), expected, "{resource}");
        let late = values.put(resource, fence(41), b"late").await;
        assert!(matches!(late, Err(Error::Stale { seen, .. }) if seen == fence(42)), "{resource}: {late:?}");
        values.put(resource, fence(43), b"next").await.unwrap();
    }
}
