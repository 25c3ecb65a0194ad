//! Golden fixtures of the recipes' records: bytes in `tests/golden/` that today's code wrote and tomorrow's must read.
//!
//! One test reads each fixture through the public API. The other runs the same calls on an empty store and compares what they
//! write with the fixture, byte for byte, except for values that differ from run to run (fences, marks, times, the host). If it
//! fails, the stored format has changed: raise the version in the format, keep the old fixture readable, and add a new one.
//! `LOCKKEEPER_GOLDEN=write` writes the fixtures anew.
#![cfg(feature = "memory")]

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper::cached::{CachedStart, ValueState};
use lockkeeper::once::{OnFailure, OnceStart};
use lockkeeper::store::{Expect, Store};
use lockkeeper::windows::Window;
use lockkeeper::{Error, LockName, Lockkeeper};

/// The records of the fixtures: file and key.
const RECORDS: [(&str, &str); 17] = [
    ("register-v1", "visits"),
    ("register-deleted-v1", "deleted"),
    ("once-done-v1", "once/charge"),
    ("once-failed-v1", "once/decline"),
    ("once-running-v1", "once/slow"),
    ("cached-v1", "cached/report"),
    ("cached-first-v1", "cached/slow"),
    ("cached-fresh-v1", "cached-fresh/report"),
    ("cached-failed-v1", "cached-failed/broken"),
    ("semaphore-v1", "semaphore/pool"),
    ("election-v1", "election/scheduler"),
    ("partitions-v1", "partition-group/orders"),
    ("window-running-v1", "window/hourly"),
    ("window-done-v1", "window/nightly"),
    ("claim-taken-v1", "claim/004/work/taken"),
    ("claim-done-v1", "claim/004/work/done"),
    ("claim-failed-v1", "claim/004/work/failed"),
];
/// The windows of the fixtures, in milliseconds since 1970.
const WINDOW: u64 = 20_000 * 86_400_000;

fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)
}

fn name(key: &str) -> LockName {
    LockName::new(key).unwrap()
}

/// Calls each recipe, so that the store has all records of the fixtures.
async fn write_all(keeper: &Lockkeeper) {
    let visits = keeper.register::<u64>("visits");
    for _ in 0..3 {
        visits.update(|old| old.unwrap_or(0) + 1).await.unwrap();
    }
    let deleted = keeper.register_bytes("deleted");
    deleted.update(|_| b"x".to_vec()).await.unwrap();
    deleted.remove(None).await.unwrap();
    let charge = keeper.once("charge").fingerprint("order 42");
    charge.run(|_| async { Ok::<_, String>(4711) }).await.unwrap();
    let decline = keeper.once("decline").on_failure(OnFailure::Keep);
    decline.run(|_| async { Err::<u64, _>("declined".to_owned()) }).await.unwrap();
    let OnceStart::Run(slow) = keeper.once("slow").claim().await.unwrap() else {
        panic!("no other caller runs")
    };
    std::mem::forget(slow);
    write_cached(keeper).await;
    keeper.semaphore("pool", 3).resize(5).await.unwrap();
    let leader = keeper.election("scheduler").campaign("10.0.0.7:4000").await.unwrap();
    leader.proclaim("10.0.0.7:4001").await.unwrap();
    leader.resign().await.unwrap();
    let member = keeper.partitions("orders", 4).member("worker-1").weight(2).join().await.unwrap();
    std::mem::forget(member);
    for (job, done) in [("hourly", false), ("nightly", true)] {
        let guard = keeper.lock(job).acquire().await.unwrap();
        let begun = keeper.windows(job).zone("Europe/Berlin").begin(&guard, WINDOW).await.unwrap();
        let Window::Ours(run) = begun else { panic!("no other host runs") };
        if done {
            run.finish(&guard, 3).await.unwrap();
        }
        guard.release().await.unwrap();
    }
    write_claims(keeper).await;
}

/// One item of each state: taken, done, failed for good.
async fn write_claims(keeper: &Lockkeeper) {
    let group = keeper.claim("work").unwrap().max_attempts(1);
    for id in ["done", "failed", "taken"] {
        let item = group.from([id]).unwrap().next().await.unwrap().expect("it is free");
        match id {
            "done" => item.complete().await.unwrap(),
            "failed" => drop(item.fail("declined").await.unwrap()),
            _ => std::mem::forget(item),
        }
    }
}

async fn write_cached(keeper: &Lockkeeper) {
    let hour = Duration::from_secs(3600);
    let report = keeper.cached("report").ttl(hour).stale_while(hour).jitter(0.0);
    report.get(|_| async { Ok::<_, String>(4711) }).await.unwrap();
    for key in ["slow", "broken"] {
        let cached = keeper.cached(key).lease(hour).negative(hour);
        let CachedStart::Refresh(permit) = cached.claim().await.unwrap() else {
            panic!("no other caller computes")
        };
        match key {
            "slow" => std::mem::forget(permit),
            _ => assert_eq!(permit.fail("the source is down").await.unwrap(), None),
        }
    }
}

/// The text of a record without what differs from run to run: every number of 10 or more digits, every mark, the host, the pid.
fn normalized(value: &[u8]) -> String {
    let text =
        String::from_utf8_lossy(value).replace(&format!("\"pid\":{}", std::process::id()), "\"pid\":4711");
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
        match &rest[..word] {
            "" => out.push(first),
            number if number.len() >= 10 && number.bytes().all(|b| b.is_ascii_digit()) => {
                out.push_str("NUMBER")
            }
            mark if mark.len() == 16 && mark.bytes().all(|b| b.is_ascii_hexdigit()) => out.push_str("MARK"),
            other => out.push_str(other),
        }
        rest = &rest[word.max(if word == 0 { first.len_utf8() } else { 0 })..];
    }
    if let Some((before, by)) = out.split_once("\"by\":\"") {
        let after = by.split_once('"').map_or("", |(_, after)| after);
        return format!("{before}\"by\":\"PROCESS\"{after}");
    }
    let out = match out.split_once("\"took_ms\":") {
        Some((before, after)) => {
            format!("{before}TOOK{}", after.trim_start_matches(|c: char| c.is_ascii_digit()))
        }
        None => out,
    };
    let (before, host) = out.split_once("\"host\":\"").unwrap_or((&out, ""));
    match host.split_once('"') {
        Some((host, _)) if !host.is_empty() => {
            out.replace(&format!("\"host\":\"{host}\""), "\"host\":\"HOST\"")
        }
        _ => [before, host].concat(),
    }
}

#[tokio::test]
async fn the_written_bytes_do_not_change_without_a_new_version() {
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    write_all(&keeper).await;
    for (file, key) in RECORDS {
        let written =
            keeper.store().read(&name(key)).await.unwrap().unwrap_or_else(|| panic!("no record {key}"));
        if std::env::var_os("LOCKKEEPER_GOLDEN").is_some() {
            fs::write(path(file), &written.value).unwrap();
        }
        let golden = fs::read(path(file)).unwrap();
        assert_eq!(normalized(&written.value), normalized(&golden), "{file}: the format has changed");
        let versions = ["lk1 ", "lk0 ", "{\"v\":1,"];
        assert!(versions.iter().any(|v| golden.starts_with(v.as_bytes())), "{file} has a version");
    }
}

#[tokio::test]
async fn todays_code_reads_the_fixtures() {
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let store: Arc<dyn Store> = keeper.store().clone();
    for (file, key) in RECORDS {
        let value = fs::read(path(file)).unwrap();
        store.write(&name(key), &value, Expect::Absent, None).await.unwrap();
    }
    let visits = keeper.register::<u64>("visits");
    assert_eq!(visits.read().await.unwrap().unwrap().value, 3);
    assert_eq!(visits.update(|old| old.unwrap() + 1).await.unwrap().value, 4);
    assert_eq!(keeper.register_bytes("deleted").read().await.unwrap(), None);

    let charge = keeper.once("charge").fingerprint("order 42");
    let done = charge.run(|_| async { Err::<u64, _>("ran again".to_owned()) }).await.unwrap();
    assert_eq!((done.result, done.replayed), (Ok(4711), true));
    let other = keeper.once("charge").fingerprint("order 43").result().await;
    assert!(matches!(other, Err(Error::Invalid(_))), "{other:?}");
    let failed = keeper.once("decline").result().await.unwrap().unwrap();
    assert_eq!((failed.result.ok, &failed.result.bytes[..]), (false, &b"\"declined\""[..]));
    let slow = keeper.once("slow");
    assert_eq!(slow.result().await.unwrap(), None);
    let taken_over = slow.run(|_| async { Ok::<_, String>(1) }).await.unwrap();
    assert!(!taken_over.replayed, "the runner of the fixture holds no lock any more");

    let report = keeper.cached("report").current().await.unwrap().expect("a value");
    assert_eq!((&report.value[..], report.state), (&b"4711"[..], ValueState::Fresh));
    let CachedStart::Failed(failed) = keeper.cached("broken").claim().await.unwrap() else {
        panic!("the failure of the fixture is the answer")
    };
    assert_eq!(failed.error, "the source is down");
    let computed = keeper.cached("slow").get(|_| async { Ok::<_, String>(1) }).await.unwrap();
    assert_eq!((computed.state, computed.not_stored), (ValueState::Computed, None));
    assert_eq!(keeper.semaphore("pool", 3).limit().await.unwrap(), 5);

    let election = keeper.election("scheduler");
    assert_eq!(election.leader().await.unwrap(), None, "the leader of the fixture has resigned");
    let leader = election.campaign("10.0.0.8:4000").await.unwrap();
    assert_eq!(election.leader().await.unwrap().unwrap().number, 1);
    leader.resign().await.unwrap();

    let group = keeper.claim("work").unwrap().max_attempts(2);
    let failed = group.failed().await.unwrap();
    assert_eq!((failed.len(), &*failed[0].id, &*failed[0].error), (1, "failed", "declined"));
    let mut source = group.from(["done", "failed", "taken"]).unwrap();
    let item = source.next().await.unwrap().expect("the worker of the fixture has no lease any more");
    assert_eq!((item.id(), item.attempt_number()), ("taken", 2));
    item.complete().await.unwrap();
    assert!(source.next().await.unwrap().is_none());
    let group = keeper.partition_status("orders").await.unwrap().unwrap();
    let member = &group.members[0];
    assert_eq!((group.count, &*member.name, member.weight, member.assigned), (4, "worker-1", 2, 4));
    let member = keeper.partitions("orders", 4).member("worker-1").join().await.unwrap();
    member.leave().await.unwrap();
    assert_eq!(keeper.partition_status("orders").await.unwrap(), None);

    let nightly = keeper.windows("nightly").zone("Europe/Berlin");
    let record = nightly.record().await.unwrap().unwrap();
    assert_eq!((record.at_ms, record.exit_code(), record.failures), (WINDOW, Some(3), 1));
    let guard = keeper.lock("nightly").acquire().await.unwrap();
    assert!(matches!(nightly.begin(&guard, WINDOW).await.unwrap(), Window::Done(_)));
    let guard = keeper.lock("hourly").acquire().await.unwrap();
    let Window::Ours(run) = keeper.windows("hourly").begin(&guard, WINDOW).await.unwrap() else {
        panic!("the run of the fixture did not end")
    };
    assert!(run.taken_over);
    run.finish(&guard, 0).await.unwrap();
}
