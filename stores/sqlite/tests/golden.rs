//! The golden fixtures: rows of each format as SQL, which later versions must read. Values that differ from run to run (the boot,
//! the process, the peer) are placeholders. Formats 1 and 2 have the tables of the programs that wrote them, and the rows of format 3.
//! `format-3-more.sql` has the tables that are made when they are first needed, and every kind of hold. The fixture of the fence
//! floor is tested in `fence_floor.rs`.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Dir, name, open_by, request, wait_for_waiters, waiting};
use lockkeeper::Lockkeeper;
use lockkeeper::limit::PER_HOUR;
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Event, Expect, Grant, HolderView, LockRequest, Locks, Mode, Owner,
    Records, ReleaseOutcome, RenewOutcome, RequestKey,
};
use lockkeeper_host::{Process, VirtualClock};
use lockkeeper_sqlite::SqliteStore;
use rusqlite::Connection;

const GOLDEN: &str = include_str!("golden/format-3.sql");
const MORE: &str = include_str!("golden/format-3-more.sql");
const OLDER: [(i64, &str); 2] =
    [(1, include_str!("golden/format-1.sql")), (2, include_str!("golden/format-2.sql"))];
const TABLES: [&str; 7] = ["state", "hold", "held_name", "waiter", "queue_entry", "delay", "record"];
const MORE_TABLES: [&str; 8] =
    ["state", "hold", "held_name", "delay", "event", "watcher", "limit_bucket", "revoked"];

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

fn with_key(request: LockRequest, byte: u8) -> LockRequest {
    let key = RequestKey { attempt: Attempt::from_bytes([byte; 16]), names: request.key.names.clone() };
    let holder = lockkeeper_core::Holder::new("here", 7, Some("golden".into())).unwrap();
    LockRequest { key, holder: Arc::new(holder), ..request }
}

/// The values that differ from run to run, and their placeholders.
fn variables(peer: &str) -> Vec<(String, &'static str)> {
    let process = Process::this().unwrap();
    let boot = lockkeeper_host::boot_id().unwrap().unwrap_or_default();
    let triple = format!("{},{},{}", process.pid, process.start, process.namespace);
    vec![(format!("'{boot}'"), "$BOOT"), (triple, "$PROCESS"), (format!("X'{peer}'"), "$PEER")]
}

fn dump(file: &Connection, tables: &[&str]) -> String {
    let mut text = String::new();
    let mut schema =
        file.prepare("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid").unwrap();
    for sql in schema.query_map([], |row| row.get::<_, String>(0)).unwrap() {
        text += &format!("{};\n", sql.unwrap());
    }
    for table in tables {
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

/// Compares the stored rows with a fixture, or writes it anew.
fn check_fixture(mut text: String, peer: &str, file: &str, golden: &str) {
    for (value, placeholder) in variables(peer) {
        text = text.replace(&value, placeholder);
    }
    if std::env::var_os("LOCKKEEPER_WRITE_GOLDEN").is_some() {
        return std::fs::write(format!("tests/golden/{file}"), text).unwrap();
    }
    assert_eq!(text, golden, "the stored rows have changed: raise the format's version and add a fixture");
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
    let text = dump(&file, &TABLES);
    waiter.abort();
    check_fixture(text, &peer, "format-3.sql", GOLDEN);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rows_of_the_fixtures_are_read() {
    for (format, golden) in OLDER.into_iter().chain([(3, GOLDEN)]) {
        the_rows_are_read(format, golden).await;
    }
}

/// Makes a file with these rows, as another process of this host wrote them.
fn create(dir: &Dir, format: i64, golden: &str) {
    let mut text = golden.to_owned();
    for (value, placeholder) in variables(&"00".repeat(16)) {
        text = text.replace(placeholder, &value);
    }
    let file = Connection::open(dir.db()).unwrap();
    file.execute_batch(&format!("PRAGMA application_id = 1280012402; PRAGMA user_version = {format}"))
        .unwrap();
    file.execute_batch(&text).unwrap();
}

/// Opens a file with these rows, and continues the locks in it.
async fn the_rows_are_read(format: i64, golden: &str) {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    create(&dir, format, golden);
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
    let grant = grant_of(&held, &view.held[0]);
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

/// The grant of a request whose hold the file has.
fn grant_of(request: &LockRequest, held: &HolderView) -> Grant {
    Grant {
        key: request.key.clone(),
        fence: held.fence,
        mode: request.mode,
        ttl: request.ttl,
        sent_at: BootInstant::default(),
        lease: request.ttl,
    }
}

/// The requests whose holds are in the second fixture: shared, a permit, with an owner, and one that is revoked.
fn more_requests() -> [LockRequest; 4] {
    [
        with_key(LockRequest { mode: Mode::Shared, ..request("shared") }, 1),
        with_key(LockRequest { mode: Mode::Permit(2), ..request("permits") }, 2),
        with_key(LockRequest { owner: Some(Owner::from_bytes([9; 16])), ..request("owned") }, 3),
        with_key(request("revoked"), 4),
    ]
}

const MORE_TTL: Duration = Duration::from_secs(10);
const DELAY: Duration = Duration::from_secs(600);

fn keeper(store: &SqliteStore, clock: &VirtualClock) -> Lockkeeper {
    Lockkeeper::with_store(Arc::new(store.clone()), Arc::new(clock.clone()))
}

/// Takes tokens of a limit of five an hour.
async fn take_tokens(store: &SqliteStore, clock: &VirtualClock, count: u64) -> bool {
    let limit = keeper(store, clock).limit("mail").rate(5, PER_HOUR).burst(5);
    limit.take(count).await.unwrap().allowed()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rows_of_the_other_tables_are_those_of_the_fixture() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    let _events = store.watch("").await.unwrap();
    for request in more_requests() {
        common::take(&store, &request).await;
    }
    let delayed = LockRequest { ttl: MORE_TTL, lock_delay: DELAY, ..request("delayed") };
    common::take(&store, &with_key(delayed, 5)).await;
    store.revoke(&name("revoked"), "a reason").await.unwrap();
    assert!(take_tokens(&store, &clock, 4).await);
    clock.advance(MORE_TTL * 2);
    common::refused(&store, &with_key(request("delayed"), 6)).await;
    let file = Connection::open(dir.db()).unwrap();
    let peer = file.query_row("SELECT hex(peer) FROM watcher", [], |row| row.get::<_, String>(0)).unwrap();
    check_fixture(dump(&file, &MORE_TABLES), &peer, "format-3-more.sql", MORE);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rows_of_the_other_tables_are_read() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    clock.advance(MORE_TTL * 2);
    let (events, rows): (Vec<&str>, Vec<&str>) =
        MORE.split_inclusive(";\n").partition(|line| line.starts_with("INSERT INTO event"));
    create(&dir, 3, &rows.concat());
    let store = open_by(&dir.db(), &clock);
    // A watcher reads the events that come after it has begun.
    let mut watcher = store.watch("").await.unwrap();
    Connection::open(dir.db()).unwrap().execute_batch(&events.concat()).unwrap();
    let mut seen: Vec<Event> = Vec::new();
    while seen.len() < events.len() {
        let next = std::future::poll_fn(|cx| watcher.as_mut().poll_next(cx));
        seen.push(common::soon("the events are delivered", next).await.unwrap().unwrap());
    }
    let kinds: Vec<_> = seen.iter().map(|event| (event.name.as_str(), event.kind.as_str())).collect();
    let granted = ["shared", "permits", "owned", "revoked", "delayed"].map(|name| (name, "granted"));
    assert_eq!(kinds, [&granted[..], &[("revoked", "revoked"), ("delayed", "expired")]].concat());
    assert_eq!(seen[0].holder.as_ref().unwrap().label.as_deref(), Some("golden"));

    let [shared, permit, owned, revoked] = more_requests();
    for held in [&shared, &permit, &owned] {
        let view = store.inspect(held.key.names.first()).await.unwrap().unwrap();
        assert_eq!(view.held[0].mode, held.mode);
        let grant = grant_of(held, &view.held[0]);
        assert_eq!(store.renew(&[grant]).await.unwrap(), [RenewOutcome::Renewed], "{:?}", held.mode);
    }
    common::take(&store, &LockRequest { mode: Mode::Shared, ..request("shared") }).await;
    common::refused(&store, &request("shared")).await;
    common::take(&store, &LockRequest { mode: Mode::Permit(2), ..request("permits") }).await;
    common::refused(&store, &LockRequest { mode: Mode::Permit(2), ..request("permits") }).await;
    common::take(&store, &LockRequest { owner: owned.owner, ..request("owned") }).await;
    common::refused(&store, &request("owned")).await;
    let view = store.inspect(&name("revoked")).await.unwrap().unwrap();
    assert_eq!(view.held[0].revoked.as_deref(), Some("a reason"));
    let renewed = store.renew(&[grant_of(&revoked, &view.held[0])]).await.unwrap();
    assert_eq!(renewed, [RenewOutcome::Revoked("a reason".into())]);
    assert!(take_tokens(&store, &clock, 1).await && !take_tokens(&store, &clock, 1).await);
    common::refused(&store, &request("delayed")).await;
    clock.advance(DELAY);
    common::take(&store, &request("delayed")).await;
}
