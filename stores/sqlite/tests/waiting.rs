//! Waiting and watching, by a clock that the test turns.

mod common;

use std::time::Duration;

use common::{Dir, name, open, open_by, request, soon, take, wait_for_waiters, waiting};
use lockkeeper_core::{
    AcquireOutcome, EventKind, EventStream, LockRequest, Locks, Mode, ReleaseOutcome, RequestKey, Wait,
};
use lockkeeper_host::VirtualClock;
use lockkeeper_sqlite::SqliteStore;
use tokio::task::JoinHandle;

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

fn start(store: &SqliteStore, request: &LockRequest) -> JoinHandle<lockkeeper_core::Result<AcquireOutcome>> {
    let (store, request) = (store.clone(), request.clone());
    tokio::spawn(async move { store.acquire(&request).await })
}

async fn next(events: &mut EventStream) -> EventKind {
    let next = std::future::poll_fn(|cx| events.as_mut().poll_next(cx));
    soon("an event", next).await.unwrap().unwrap().kind
}

#[tokio::test(flavor = "multi_thread")]
async fn waits_and_leases_end_by_the_clock_of_the_store() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let (one, two) = (open_by(&dir.db(), &clock), open_by(&dir.db(), &clock));
    let held = take(&one, &LockRequest { ttl: Duration::from_secs(50), ..request("jobs") }).await;
    let short = start(&two, &LockRequest { wait: Wait::For(Duration::from_secs(20)), ..request("jobs") });
    wait_for_waiters(&one, "jobs", 1).await;
    let long = start(&two, &waiting("jobs"));
    wait_for_waiters(&one, "jobs", 2).await;
    clock.advance(Duration::from_secs(20));
    let answer = soon("patience ends", short).await.unwrap().unwrap();
    let AcquireOutcome::Busy(busy) = answer else { panic!("{answer:?}") };
    assert_eq!((busy.held[0].fence, busy.held[0].expires_in_ms), (held.fence, 30_000));
    wait_for_waiters(&one, "jobs", 1).await;
    clock.advance(Duration::from_secs(30));
    let answer = soon("the lease ends", long).await.unwrap().unwrap();
    let AcquireOutcome::Granted(grant) = answer else { panic!("{answer:?}") };
    assert!(grant.fence > held.fence);
    assert_eq!(one.release(&held.key).await.unwrap(), ReleaseOutcome::AlreadyGone);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_request_does_not_block_the_queue() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let held = take(&one, &request("jobs")).await;
    let dropped = waiting("jobs");
    let task = start(&two, &dropped);
    wait_for_waiters(&one, "jobs", 1).await;
    let behind = start(&one, &waiting("jobs"));
    wait_for_waiters(&one, "jobs", 2).await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    // No caller withdraws the request, and still no waiter waits for its lease.
    one.release(&held.key).await.unwrap();
    assert!(matches!(soon("the next is served", behind).await.unwrap(), Ok(AcquireOutcome::Granted(_))));
    assert_eq!(two.release(&dropped.key).await.unwrap(), ReleaseOutcome::AlreadyGone);
}

/// A process is stopped inside a transaction, so that the release of a waiting request fails, and its caller gives up.
/// Its queue entry blocked all waiters behind it for as long as the process lived.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_entry_whose_release_failed_does_not_stay() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let held = take(&one, &request("jobs")).await;
    let given_up = waiting("jobs");
    let task = start(&two, &given_up);
    wait_for_waiters(&one, "jobs", 1).await;
    let stopped = rusqlite::Connection::open(dir.db()).unwrap();
    stopped.execute_batch("BEGIN IMMEDIATE").unwrap();
    task.abort();
    let failed = two.release(&given_up.key).await;
    assert!(matches!(failed, Err(lockkeeper_core::Error::Unavailable(_))), "{failed:?}");
    stopped.execute_batch("ROLLBACK").unwrap();
    wait_for_waiters(&one, "jobs", 0).await;
    one.release(&held.key).await.unwrap();
    take(&one, &request("jobs")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_withdrawn_by_another_store_gets_an_error() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    take(&one, &request("jobs")).await;
    let asked = waiting("jobs");
    let task = start(&two, &asked);
    wait_for_waiters(&one, "jobs", 1).await;
    assert_eq!(one.release(&asked.key).await.unwrap(), ReleaseOutcome::Released);
    let answer = soon("it is told", task).await.unwrap();
    assert!(matches!(answer, Err(lockkeeper_core::Error::Unknown(_))), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_behind_a_writer_are_served_together_across_stores() {
    let dir = Dir::new();
    let stores: Vec<_> = (0..4).map(|_| open(&dir.db())).collect();
    let writer = take(&stores[0], &request("jobs")).await;
    let mut readers = Vec::new();
    for (i, store) in stores.iter().enumerate() {
        readers.push(start(store, &LockRequest { mode: Mode::Shared, ..waiting("jobs") }));
        wait_for_waiters(&stores[0], "jobs", i + 1).await;
    }
    stores[0].release(&writer.key).await.unwrap();
    for reader in readers {
        assert!(matches!(soon("a reader is served", reader).await.unwrap(), Ok(AcquireOutcome::Granted(_))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wake_directory_that_was_cleaned_away_is_made_again() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let held = take(&one, &request("jobs")).await;
    let task = start(&two, &waiting("jobs"));
    wait_for_waiters(&one, "jobs", 1).await;
    std::fs::remove_dir_all(dir.path().join("locks.db.wake")).unwrap();
    // The release takes the waiter for dead; its process joins the queue again when it notices.
    one.release(&held.key).await.unwrap();
    assert!(matches!(soon("the waiter is served", task).await.unwrap(), Ok(AcquireOutcome::Granted(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_hears_what_other_stores_do_and_that_it_missed_something() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let mut events = two.watch("jo").await.unwrap();
    let grant = take(&one, &request("jobs")).await;
    take(&one, &request("other")).await;
    assert_eq!(next(&mut events).await, EventKind::Granted { fence: grant.fence });
    one.release(&grant.key).await.unwrap();
    assert_eq!(next(&mut events).await, EventKind::Released { fence: grant.fence });
    // More happens than is kept for it.
    for _ in 0..600 {
        let grant = take(&one, &request("jobs")).await;
        one.release(&grant.key).await.unwrap();
    }
    let mut seen = Vec::new();
    while seen.last() != Some(&"missed") {
        let kind = match seen.len() {
            // It has caught up with what was kept: one more thing happens, and with it comes the notice.
            1024 => {
                take(&one, &request("jobs")).await;
                next(&mut events).await
            }
            _ => next(&mut events).await,
        };
        seen.push(kind.as_str());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_ends_without_a_request_is_reported() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let (one, two) = (open_by(&dir.db(), &clock), open_by(&dir.db(), &clock));
    let mut events = two.watch("").await.unwrap();
    let grant = take(&one, &LockRequest { ttl: Duration::from_secs(10), ..request("jobs") }).await;
    assert_eq!(next(&mut events).await, EventKind::Granted { fence: grant.fence });
    clock.advance(Duration::from_secs(10));
    assert_eq!(next(&mut events).await, EventKind::Expired { fence: grant.fence });
}

#[tokio::test]
async fn a_break_is_recorded_without_watchers() {
    let dir = Dir::new();
    let store = open(&dir.db());
    let grant = take(&store, &request("jobs")).await;
    let fence = store.break_lock(&name("jobs"), "the host is on fire").await.unwrap();
    assert!(fence > grant.fence);
    let file = rusqlite::Connection::open(dir.db()).unwrap();
    let rows: Vec<(String, String)> = file
        .prepare("SELECT kind, reason FROM event")
        .unwrap()
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(rows, [("broken".to_owned(), "the host is on fire".to_owned())]);
}

#[tokio::test]
async fn expired_rows_are_removed() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    for i in 0..100 {
        take(&store, &LockRequest { ttl: Duration::from_secs(1), ..request(&format!("brief/{i}")) }).await;
    }
    clock.advance(Duration::from_secs(2));
    for i in 0..100 {
        let asked = request(&format!("later/{i}"));
        take(&store, &asked).await;
        let key: &RequestKey = &asked.key;
        store.release(key).await.unwrap();
    }
    let file = rusqlite::Connection::open(dir.db()).unwrap();
    let count = |table: &str| -> i64 {
        file.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
    };
    assert_eq!((count("hold"), count("held_name")), (0, 0));
}
