//! Waiting and watching, by a clock that the test turns.

mod common;

use std::time::Duration;

use common::{Dir, ask, in_line, name, open, open_by, soon, take, waiting};
use lockkeeper_core::{Acquired, Ask, Claim, EventKind, EventStream, Locks, Mode, Release, Wait};
use lockkeeper_host::VirtualClock;
use lockkeeper_sqlite::SqliteStore;
use tokio::task::JoinHandle;

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

fn start(store: &SqliteStore, ask: &Ask) -> JoinHandle<lockkeeper_core::Result<Acquired>> {
    let (store, ask) = (store.clone(), ask.clone());
    tokio::spawn(async move { store.acquire(&ask).await })
}

async fn next(events: &mut EventStream) -> EventKind {
    let next = std::future::poll_fn(|cx| events.as_mut().poll_next(cx));
    soon("an event", next).await.unwrap().unwrap().kind
}

#[tokio::test(flavor = "multi_thread")]
async fn patience_and_leases_end_by_the_stores_own_clock() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let (one, two) = (open_by(&dir.db(), &clock), open_by(&dir.db(), &clock));
    let held = take(&one, &Ask { ttl: Duration::from_secs(50), ..ask("jobs") }).await;
    let short = start(&two, &Ask { wait: Wait::For(Duration::from_secs(20)), ..ask("jobs") });
    in_line(&one, "jobs", 1).await;
    let long = start(&two, &waiting("jobs"));
    in_line(&one, "jobs", 2).await;
    clock.advance(Duration::from_secs(20));
    let answer = soon("patience ends", short).await.unwrap().unwrap();
    let Acquired::Busy(busy) = answer else { panic!("{answer:?}") };
    assert_eq!((busy.held[0].fence, busy.held[0].expires_in_ms), (held.fence, 30_000));
    in_line(&one, "jobs", 1).await;
    clock.advance(Duration::from_secs(30));
    let answer = soon("the lease ends", long).await.unwrap().unwrap();
    let Acquired::Granted(grant) = answer else { panic!("{answer:?}") };
    assert!(grant.fence > held.fence);
    assert_eq!(one.release(&held.claim).await.unwrap(), Release::AlreadyGone);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ask_that_was_dropped_does_not_keep_the_line_waiting() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let held = take(&one, &ask("jobs")).await;
    let dropped = waiting("jobs");
    let task = start(&two, &dropped);
    in_line(&one, "jobs", 1).await;
    let behind = start(&one, &waiting("jobs"));
    in_line(&one, "jobs", 2).await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    // Nobody withdraws it, and still nobody waits for its lease.
    one.release(&held.claim).await.unwrap();
    assert!(matches!(soon("the next is served", behind).await.unwrap(), Ok(Acquired::Granted(_))));
    assert_eq!(two.release(&dropped.claim).await.unwrap(), Release::AlreadyGone);
}

/// A process is stopped inside a transaction, so that the release of a waiting request fails, and its caller gives up.
/// Its queue entry held up everybody behind it for as long as the process lived.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_entry_whose_release_failed_does_not_stay() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let held = take(&one, &ask("jobs")).await;
    let given_up = waiting("jobs");
    let task = start(&two, &given_up);
    in_line(&one, "jobs", 1).await;
    let stopped = rusqlite::Connection::open(dir.db()).unwrap();
    stopped.execute_batch("BEGIN IMMEDIATE").unwrap();
    task.abort();
    let failed = two.release(&given_up.claim).await;
    assert!(matches!(failed, Err(lockkeeper_core::Error::Unavailable(_))), "{failed:?}");
    stopped.execute_batch("ROLLBACK").unwrap();
    in_line(&one, "jobs", 0).await;
    one.release(&held.claim).await.unwrap();
    take(&one, &ask("jobs")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ask_withdrawn_elsewhere_is_told_so() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    take(&one, &ask("jobs")).await;
    let asked = waiting("jobs");
    let task = start(&two, &asked);
    in_line(&one, "jobs", 1).await;
    assert_eq!(one.release(&asked.claim).await.unwrap(), Release::Released);
    let answer = soon("it is told", task).await.unwrap();
    assert!(matches!(answer, Err(lockkeeper_core::Error::Unknown(_))), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_behind_a_writer_are_served_together_across_stores() {
    let dir = Dir::new();
    let stores: Vec<_> = (0..4).map(|_| open(&dir.db())).collect();
    let writer = take(&stores[0], &ask("jobs")).await;
    let mut readers = Vec::new();
    for (i, store) in stores.iter().enumerate() {
        readers.push(start(store, &Ask { mode: Mode::Shared, ..waiting("jobs") }));
        in_line(&stores[0], "jobs", i + 1).await;
    }
    stores[0].release(&writer.claim).await.unwrap();
    for reader in readers {
        assert!(matches!(soon("a reader is served", reader).await.unwrap(), Ok(Acquired::Granted(_))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wake_directory_that_was_cleaned_away_is_made_again() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let held = take(&one, &ask("jobs")).await;
    let task = start(&two, &waiting("jobs"));
    in_line(&one, "jobs", 1).await;
    std::fs::remove_dir_all(dir.path().join("locks.db.wake")).unwrap();
    // Taken for dead by the release; but it comes back to the line when it notices.
    one.release(&held.claim).await.unwrap();
    assert!(matches!(soon("the waiter is served", task).await.unwrap(), Ok(Acquired::Granted(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_hears_what_other_stores_do_and_that_it_missed_something() {
    let dir = Dir::new();
    let (one, two) = (open(&dir.db()), open(&dir.db()));
    let mut events = two.watch("jo").await.unwrap();
    let grant = take(&one, &ask("jobs")).await;
    take(&one, &ask("other")).await;
    assert_eq!(next(&mut events).await, EventKind::Granted { fence: grant.fence });
    one.release(&grant.claim).await.unwrap();
    assert_eq!(next(&mut events).await, EventKind::Released { fence: grant.fence });
    // More happens than is kept for it.
    for _ in 0..600 {
        let grant = take(&one, &ask("jobs")).await;
        one.release(&grant.claim).await.unwrap();
    }
    let mut seen = Vec::new();
    while seen.last() != Some(&"missed") {
        let kind = match seen.len() {
            // It has caught up with what was kept: one more thing happens, and with it comes the notice.
            1024 => {
                take(&one, &ask("jobs")).await;
                next(&mut events).await
            }
            _ => next(&mut events).await,
        };
        seen.push(kind.word());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_nobody_asks_about_is_told_when_it_ends() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let (one, two) = (open_by(&dir.db(), &clock), open_by(&dir.db(), &clock));
    let mut events = two.watch("").await.unwrap();
    let grant = take(&one, &Ask { ttl: Duration::from_secs(10), ..ask("jobs") }).await;
    assert_eq!(next(&mut events).await, EventKind::Granted { fence: grant.fence });
    clock.advance(Duration::from_secs(10));
    assert_eq!(next(&mut events).await, EventKind::Expired { fence: grant.fence });
}

#[tokio::test]
async fn a_break_is_written_down_even_if_nobody_watches() {
    let dir = Dir::new();
    let store = open(&dir.db());
    let grant = take(&store, &ask("jobs")).await;
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
async fn what_is_over_is_cleared_away() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    for i in 0..100 {
        take(&store, &Ask { ttl: Duration::from_secs(1), ..ask(&format!("brief/{i}")) }).await;
    }
    clock.advance(Duration::from_secs(2));
    for i in 0..100 {
        let asked = ask(&format!("later/{i}"));
        take(&store, &asked).await;
        let claim: &Claim = &asked.claim;
        store.release(claim).await.unwrap();
    }
    let file = rusqlite::Connection::open(dir.db()).unwrap();
    let count = |table: &str| -> i64 {
        file.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
    };
    assert_eq!((count("hold"), count("stake")), (0, 0));
}
