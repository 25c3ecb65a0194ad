//! The golden fixtures: rows of each format as SQL, which later versions must read. Values that differ from run to run (the boot,
//! the process, the peer) are placeholders. Formats 1 and 2 have the tables of the programs that wrote them, and the rows of format 3.
//! The fixture of the fence floor is tested in `fence_floor.rs`.

mod common;

use std::time::Duration;

use common::{Dir, name, open_by, request, wait_for_waiters, waiting};
use lockkeeper_core::{
    AcquireOutcome, Attempt, Expect, Grant, LockRequest, Locks, Names, Records, ReleaseOutcome, RenewOutcome,
    RequestKey,
};
use lockkeeper_host::{Process, VirtualClock};
use rusqlite::Connection;

const GOLDEN: &str = include_str!("golden/format-3.sql");
const OLDER: [(i64, &str); 2] =
    [(1, include_str!("golden/format-1.sql")), (2, include_str!("golden/format-2.sql"))];
const TABLES: [&str; 7] = ["state", "hold", "held_name", "waiter", "queue_entry", "delay", "record"];

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

fn with_key(request: LockRequest, byte: u8) -> LockRequest {
    let key = RequestKey { attempt: Attempt::from_bytes([byte; 16]), names: Names::from(name("jobs")) };
    let holder = lockkeeper_core::Holder::new("here", 7, Some("golden".into())).unwrap();
    LockRequest { key, holder: std::sync::Arc::new(holder), ..request }
}

/// The values that differ from run to run, and their placeholders.
fn variables(peer: &str) -> Vec<(String, &'static str)> {
    let process = Process::this().unwrap();
    let boot = lockkeeper_host::boot_id().unwrap().unwrap_or_default();
    let triple = format!("{},{},{}", process.pid, process.start, process.namespace);
    vec![(format!("'{boot}'"), "$BOOT"), (triple, "$PROCESS"), (format!("X'{peer}'"), "$PEER")]
}

fn dump(file: &Connection) -> String {
    let mut text = String::new();
    let mut schema =
        file.prepare("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid").unwrap();
    for sql in schema.query_map([], |row| row.get::<_, String>(0)).unwrap() {
        text += &format!("{};\n", sql.unwrap());
    }
    for table in TABLES {
        let mut rows = file.prepare(&format!("SELECT * FROM {table}")).unwrap();
        let columns: Vec<String> = rows.column_names().map(|name| format!("quote({name})")).collect();
        let query = format!("SELECT {} FROM {table}", columns.join("||','||"));
        rows = file.prepare(&query).unwrap();
        for row in rows.query_map([], |row| row.get::<_, String>(0)).unwrap() {
            text += &format!("INSERT INTO {table} VALUES({});\n", row.unwrap());
        }
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stored_rows_are_those_of_the_fixture() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    common::take(&store, &with_key(request("jobs"), 1)).await;
    store.write(&name("record"), b"value", Expect::Any, Some(Duration::from_secs(60))).await.unwrap();
    let waiter = tokio::spawn({
        let store = store.clone();
        async move { store.acquire(&with_key(waiting("jobs"), 2)).await }
    });
    wait_for_waiters(&store, "jobs", 1).await;
    let file = Connection::open(dir.db()).unwrap();
    let peer = file.query_row("SELECT hex(peer) FROM waiter", [], |row| row.get::<_, String>(0)).unwrap();
    let mut text = dump(&file);
    for (value, placeholder) in variables(&peer) {
        text = text.replace(&value, placeholder);
    }
    waiter.abort();
    if std::env::var_os("LOCKKEEPER_WRITE_GOLDEN").is_some() {
        return std::fs::write("tests/golden/format-3.sql", text).unwrap();
    }
    assert_eq!(text, GOLDEN, "the stored rows have changed: raise the format's version and add a fixture");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rows_of_the_fixtures_are_read() {
    for (format, golden) in OLDER.into_iter().chain([(3, GOLDEN)]) {
        the_rows_are_read(format, golden).await;
    }
}

/// Opens a file with these rows, and continues the locks in it.
async fn the_rows_are_read(format: i64, golden: &str) {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let mut text = golden.to_owned();
    for (value, placeholder) in variables(&"00".repeat(16)) {
        text = text.replace(placeholder, &value);
    }
    let file = Connection::open(dir.db()).unwrap();
    file.execute_batch(&format!("PRAGMA application_id = 1280012402; PRAGMA user_version = {format}"))
        .unwrap();
    file.execute_batch(&text).unwrap();
    drop(file);
    let store = open_by(&dir.db(), &clock);
    let next = with_key(waiting("jobs"), 2);
    // The first poll sends the request, before any inspection could remove the entry of a peer that is gone.
    let mut waiter = Box::pin(store.acquire(&next));
    tokio::select! {
        biased;
        outcome = &mut waiter => panic!("{outcome:?}"),
        () = wait_for_waiters(&store, "jobs", 1) => {}
    }
    let ticket =
        |file: &Connection| file.query_row("SELECT ticket FROM waiter", [], |row| row.get::<_, i64>(0));
    assert_eq!(
        ticket(&Connection::open(dir.db()).unwrap()).unwrap(),
        2,
        "format {format}: the waiter lost its position"
    );
    let view = store.inspect(&name("jobs")).await.unwrap().unwrap();
    let held = with_key(request("jobs"), 1);
    let grant = Grant {
        key: held.key.clone(),
        fence: view.held[0].fence,
        mode: held.mode,
        ttl: held.ttl,
        sent_at: lockkeeper_core::BootInstant::default(),
        lease: held.ttl,
    };
    assert_eq!(store.renew(std::slice::from_ref(&grant)).await.unwrap(), [RenewOutcome::Renewed]);
    assert_eq!(store.read(&name("record")).await.unwrap().unwrap().value, b"value");
    assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    let outcome = common::soon("the waiter is granted the lock", waiter).await.unwrap();
    let AcquireOutcome::Granted(granted) = outcome else { panic!("{outcome:?}") };
    assert!(granted.fence > grant.fence, "format {format}");
    let upgraded = Connection::open(dir.db()).unwrap();
    let version = upgraded.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(version, 3, "format {format} was brought up to date");
}
