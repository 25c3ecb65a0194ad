//! Stored formats: this version reads the rows that earlier versions wrote, and writes the rows that its fixture has.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, client_of, load_golden, number, sql};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Expect, Fence, Grant, Holder, LockRequest, Mode, ReleaseOutcome,
    RenewOutcome, Wait,
};
use lockkeeper_testkit::laws::{eventually, name, soon};
use lockkeeper_testkit::servers::{self, PostgresOptions};

const TTL: Duration = Duration::from_secs(30);

fn request(lock: &str, attempt: u8) -> LockRequest {
    let holder = Arc::new(Holder::new("db-1", 4711, Some("nightly".into())).unwrap());
    LockRequest::new(Attempt::from_bytes([attempt; 16]), name(lock), TTL, holder)
}

fn grant(request: &LockRequest, fence: Fence) -> Grant {
    let (key, mode, ttl) = (request.key.clone(), request.mode, request.ttl);
    Grant { key, fence, mode, ttl, sent_at: BootInstant::NEVER, lease: ttl }
}

/// Inspects, renews and releases what a fixture contains.
async fn check_fixture(fixture: &str) {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    load_golden(&server, fixture);
    let store = client_of(&server).await;
    let view = store.inspect(&name("orders/held")).await.unwrap().expect("the lock is held");
    assert_eq!((view.held.len(), view.waiting), (1, 1));
    assert_eq!(view.held[0].holder.host, "db-1");
    let shared_view = store.inspect(&name("orders/shared")).await.unwrap().expect("the lock is held");
    assert_eq!(shared_view.held[0].mode, Mode::Shared);
    let held = grant(&request("orders/held", 1), view.held[0].fence);
    let mut shared = request("orders/shared", 2);
    shared.mode = Mode::Shared;
    let shared = grant(&shared, shared_view.held[0].fence);
    let renewed = store.renew(&[held.clone(), shared.clone()]).await.unwrap();
    assert_eq!(renewed, [RenewOutcome::Renewed, RenewOutcome::Renewed]);
    assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(store.release(&shared.key).await.unwrap(), ReleaseOutcome::Released);
    let mut waiter = request("orders/held", 3);
    waiter.wait = Wait::For(Duration::from_secs(10));
    let outcome = soon("the waiter is granted the lock", store.acquire(&waiter)).await.unwrap();
    let AcquireOutcome::Granted(next) = outcome else { panic!("{outcome:?}") };
    assert!(next.fence > held.fence);
    let record = store.read(&name("once/42")).await.unwrap().expect("the record is there");
    assert_eq!(record.value, b"done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_version_six_are_read() {
    check_fixture(include_str!("golden/6.sql")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_version_seven_are_read() {
    check_fixture(include_str!("golden/7.sql")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_version_eight_are_read() {
    check_fixture(include_str!("golden/8.sql")).await;
    check_bucket(include_str!("golden/8.sql")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_version_nine_are_read() {
    check_fixture(include_str!("golden/9.sql")).await;
    check_bucket(include_str!("golden/9.sql")).await;
}

/// Reads the bucket that a fixture contains.
async fn check_bucket(fixture: &str) {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    load_golden(&server, fixture);
    let keeper = common::keeper(&client_of(&server).await);
    let limit = keeper.limit("mail").rate(1, lockkeeper::limit::PER_HOUR).burst(5);
    assert_eq!(limit.peek().await.unwrap().remaining, 0, "a stored bucket was not read");
}

/// The columns and the rows of a schema, without what differs from run to run: times, fences, positions and the ids of processes.
fn stored_format(server: &servers::Server) -> String {
    let columns = "SELECT table_name || '.' || column_name || ' ' || data_type FROM information_schema.columns \
        WHERE table_schema = 'lockkeeper' ORDER BY 1";
    let rows = "SELECT concat_ws(' ', 'lock', name, attempt, ttl, flags, terms, holder, CASE WHEN expires > 0 THEN expires - since END) FROM lockkeeper.lock ORDER BY name";
    let holds = "SELECT concat_ws(' ', 'hold', name, attempt, mode, ttl, lingers, terms, holder, expires - since) FROM lockkeeper.hold";
    let waiters = "SELECT concat_ws(' ', 'waiter', name, attempt, mode, owner, terms, holder, ttl) FROM lockkeeper.waiter";
    let records = "SELECT concat_ws(' ', 'record', key, value, expires) FROM lockkeeper.record";
    let buckets =
        "SELECT concat_ws(' ', 'bucket', key, due = full_at / 16000000000 + 1) FROM lockkeeper.bucket";
    [columns, rows, holds, waiters, records, buckets].map(|text| sql(server, text)).join("\n")
}

async fn write_rows(store: &Client) -> tokio::task::JoinHandle<()> {
    let granted = |outcome| assert!(matches!(outcome, AcquireOutcome::Granted(_)), "{outcome:?}");
    granted(store.acquire(&request("orders/held", 1)).await.unwrap());
    let mut shared = request("orders/shared", 2);
    (shared.mode, shared.lock_delay) = (Mode::Shared, Duration::from_secs(1));
    granted(store.acquire(&shared).await.unwrap());
    store.write(&name("once/42"), b"done", Expect::Absent, None).await.unwrap();
    let limit = common::keeper(store).limit("mail").rate(1, lockkeeper::limit::PER_HOUR).burst(5);
    assert!(limit.take(5).await.unwrap().allowed());
    let mut waiter = request("orders/held", 3);
    waiter.wait = Wait::Forever;
    let waiting = store.clone();
    let task = tokio::spawn(async move { _ = waiting.acquire(&waiter).await });
    eventually("the waiter is in the queue", || async {
        store.inspect(&name("orders/held")).await.unwrap().is_some_and(|view| view.waiting == 1)
    })
    .await;
    task
}

/// If this fails, the stored format has changed: raise the version of the schema, write an upgrade, and add a fixture.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_writes_the_rows_of_its_fixture() {
    let Ok(fixture) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sql(&fixture, include_str!("golden/9.sql"));
    let store = client_of(&server).await;
    let waiter = write_rows(&store).await;
    let newest = "SELECT max(version) FROM lockkeeper.migration";
    assert_eq!(number(&server, newest), number(&fixture, newest), "the newest version has no fixture");
    assert_eq!(stored_format(&server), stored_format(&fixture));
    waiter.abort();
}
