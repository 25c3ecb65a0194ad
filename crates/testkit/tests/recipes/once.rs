//! Keys that many processes do once, while some are killed.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::{Duration, Instant};

use lockkeeper_testkit::resource::Ledger;
use lockkeeper_testkit::servers::{self, EtcdOptions, RedisOptions, TempDir};

use super::crowd::{Crowd, below, times};

/// A process that has begun a run just now; none, if all is done.
pub fn next_runner(runs: &Path, seen: &mut usize) -> Option<u32> {
    let patience = Instant::now() + Duration::from_millis(300);
    while Instant::now() < patience {
        let text = std::fs::read_to_string(runs).unwrap_or_default();
        if text.lines().count() > *seen {
            *seen = text.lines().count();
            return text.lines().last()?.rsplit(' ').next()?.parse().ok();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// Twelve processes do the same keys, each in an order of its own, while they are killed and stopped past their leases at
/// random. Every key is entered once in the ledger, and all who asked have the same result, byte for byte.
fn twelve_do_each_key_once(store: &str) {
    let (keys, kills) = (times(1000, 60), times(120, 15));
    let dir = TempDir::new("once");
    let file = |name: &str| dir.join(name).display().to_string();
    std::fs::create_dir(dir.join("ledger")).unwrap();
    let args = [
        format!("store={store}"),
        format!("keys={keys}"),
        format!("dir={}", file("ledger")),
        format!("results={}", file("results")),
    ];
    let started = Instant::now();
    let mut crowd = Crowd::alike("once", 12, &args);
    // Each one that is killed begins again with the first key; when enough were, the rest may come to its end.
    let mut seen = 0;
    for _ in 0..kills {
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
    let results = std::fs::read_to_string(dir.join("results")).unwrap();
    let mut seen: HashMap<&str, HashSet<&str>> = HashMap::new();
    for line in results.lines() {
        let (key, result) = line.split_once(' ').unwrap();
        seen.entry(key).or_default().insert(result);
    }
    assert_eq!(seen.len() as u64, keys);
    let ledger = Ledger::new(dir.join("ledger"));
    for (key, results) in &seen {
        assert_eq!(results.len(), 1, "the callers of {key} got different results: {results:?}");
        let entries = ledger.entries(key).unwrap();
        assert_eq!(entries.len(), 1, "{key} was done more than once: {entries:?}");
    }
    let lines = |name: &str| {
        std::fs::read_to_string(dir.join("ledger").join(name)).unwrap_or_default().lines().count()
    };
    let again = lines("runs") as u64 - keys;
    assert!(again > 0, "no process was killed in the middle of a run: the test shows nothing");
    println!(
        "{store}: {keys} keys, {kills} kills, {stops} stops, {} answers, {again} runs were taken over, {} late ones refused by \
         the ledger, {:?}",
        results.lines().count(),
        lines("refused"),
        started.elapsed()
    );
}

#[test]
fn every_key_is_done_once_on_a_file_while_runners_are_killed_and_stopped() {
    let dir = TempDir::new("once-store");
    twelve_do_each_key_once(&format!("sqlite:{}", dir.join("locks.db").display()));
}

#[test]
fn every_key_is_done_once_on_redis_while_runners_are_killed_and_stopped() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    twelve_do_each_key_once(&format!("redis://{}", server.addr()));
}

#[test]
fn every_key_is_done_once_on_etcd_while_runners_are_killed_and_stopped() {
    // A killed runner's lease lasts longer there, so it takes its time.
    if std::env::var_os("LOCKKEEPER_FULL").is_none() {
        return println!("left out: only with LOCKKEEPER_FULL");
    }
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    twelve_do_each_key_once(&format!("etcd://{}?timeout=20s", server.addr()));
}
