//! Items that eight worker processes share, while some are killed or stopped past their leases.

use std::time::{Duration, Instant};

use lockkeeper::Lockkeeper;
use lockkeeper_testkit::resource::Ledger;
use lockkeeper_testkit::servers::{self, EtcdOptions, PostgresOptions, RedisOptions, TempDir};

use super::crowd::{Crowd, below, times};
use super::once::next_runner;

/// Every item is done, and entered once in the ledger.
async fn eight_do_each_item_once(store: &str) {
    let (items, kills) = (times(2000, 400), times(80, 24));
    let dir = TempDir::new("claim");
    std::fs::create_dir(dir.join("ledger")).unwrap();
    let ledger = dir.join("ledger").display().to_string();
    let args = [format!("store={store}"), format!("items={items}"), format!("dir={ledger}")];
    let started = Instant::now();
    let mut crowd = Crowd::alike("claim", 8, &args);
    let mut seen = 0;
    for _ in 0..kills {
        // None, if all is done: then no worker can be killed in the middle of something.
        let runner = next_runner(&dir.join("ledger/runs"), &mut seen);
        std::thread::sleep(Duration::from_millis(below(20) as u64));
        crowd.go_on();
        if !crowd.stop_one(runner, Duration::from_millis(1300)) {
            crowd.kill_one(runner);
        }
    }
    let (kills, stops) = (crowd.killed.len(), crowd.stops);
    for (status, _) in crowd.finish() {
        assert!(status.success());
    }
    let keeper = Lockkeeper::open(store).await.unwrap();
    let counts = keeper.claim("work").unwrap().counts().await.unwrap();
    assert_eq!((counts.done as u64, counts.failed), (items, 0), "an item was lost: {counts:?}");
    let book = Ledger::new(&ledger);
    for n in 0..items {
        let entries = book.entries(&format!("key-{n}")).unwrap();
        assert_eq!(entries.len(), 1, "key-{n} was done more than once, or not at all: {entries:?}");
    }
    let lines = |name: &str| {
        std::fs::read_to_string(dir.join("ledger").join(name)).unwrap_or_default().lines().count()
    };
    let again = lines("runs") as u64 - items;
    assert!(again > 0, "no worker was killed in the middle of its work: the test shows nothing");
    println!(
        "{store}: {items} items, {kills} kills, {stops} stops, {again} attempts were repeated, {} refused by the ledger, {:?}",
        lines("refused"),
        started.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_item_is_done_once_on_a_file_while_workers_are_killed_and_stopped() {
    let dir = TempDir::new("claim-store");
    eight_do_each_item_once(&format!("sqlite:{}", dir.join("locks.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_item_is_done_once_on_redis_while_workers_are_killed_and_stopped() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    eight_do_each_item_once(&format!("redis://{}", server.addr())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_item_is_done_once_on_postgres_while_workers_are_killed_and_stopped() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    eight_do_each_item_once(&format!("postgres://postgres@{}/postgres?timeout=20s", server.addr())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_item_is_done_once_on_etcd_while_workers_are_killed_and_stopped() {
    // The lease of a killed worker's item lasts longer there, so it takes its time.
    if std::env::var_os("LOCKKEEPER_FULL").is_none() {
        return println!("left out: only with LOCKKEEPER_FULL");
    }
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    eight_do_each_item_once(&format!("etcd://{}?timeout=20s", server.addr())).await;
}
