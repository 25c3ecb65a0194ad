//! Permits, readers and writers, held by real processes of which some are killed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use lockkeeper::{Clock, Lockkeeper, SystemClock};
use lockkeeper_testkit::history::{self, Demand, History, Operation, OperationPhase};
use lockkeeper_testkit::servers::{self, EtcdOptions, PostgresOptions, RedisOptions, TempDir};

use super::control::Control;
use super::crowd::{Crowd, history_of, times};

const TTL: Duration = Duration::from_secs(2);
const PERMITS: usize = 3;
/// Nothing here takes this long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(240);

/// What was told until a moment. At the end the processes are killed one after the other, and those that are left go on.
fn told_until(story: &Path, killed: &[(u32, u64)], until: u64) -> History {
    let all = history_of(story, killed);
    History::new(all.events().iter().filter(|event| event.t <= until).cloned())
}

/// From when until when each hold was believed in.
fn held_times(history: &History) -> Vec<(u64, u64)> {
    let mut holds: HashMap<(&str, &str), (u64, u64)> = HashMap::new();
    let mut ended = Vec::new();
    for event in history.events() {
        let Some(attempt) = event.attempt.as_deref() else { continue };
        let key = (&*event.proc, attempt);
        match (event.op, event.phase) {
            (Operation::Acquire, OperationPhase::Ok) => {
                holds.insert(key, (event.t, event.deadline.unwrap_or(u64::MAX)));
            }
            (Operation::Release, OperationPhase::Invoke) | (Operation::Signal, _) => {
                ended.extend(holds.remove(&key).map(|(from, until)| (from, until.min(event.t))));
            }
            _ => {}
        }
    }
    ended.extend(holds.into_values());
    ended
}

/// How many processes that are alive hold now.
fn held_now(told: &History, killed: &[(u32, u64)]) -> usize {
    let dead: BTreeSet<String> = killed.iter().map(|(pid, _)| pid.to_string()).collect();
    let alive = History::new(told.events().iter().filter(|event| !dead.contains(&event.proc)).cloned());
    let now = SystemClock.now().as_nanos();
    held_times(&alive).iter().filter(|(begins, ends)| (*begins..*ends).contains(&now)).count()
}

/// The longest time in `from..until` in which fewer than all permits were held.
fn longest_with_fewer(holds: &[(u64, u64)], from: u64, until: u64) -> Duration {
    let mut steps: BTreeMap<u64, i64> = BTreeMap::new();
    for (begins, ends) in holds.iter().filter(|(begins, ends)| begins < ends) {
        *steps.entry(*begins).or_default() += 1;
        *steps.entry(*ends).or_default() -= 1;
    }
    let (mut busy, mut since, mut longest) = (0, Some(from), 0);
    for (at, change) in steps {
        busy += change;
        if busy >= PERMITS as i64 {
            longest = longest.max(since.take().map_or(0, |since: u64| at.min(until).saturating_sub(since)));
        } else {
            since = since.or(Some(at.max(from)));
        }
    }
    Duration::from_nanos(longest.max(since.map_or(0, |since| until.saturating_sub(since))))
}

/// A process that holds a permit now: the last one that was granted one.
fn holder(history: &History) -> Option<u32> {
    let granted = |op, phase| op == Operation::Acquire && phase == OperationPhase::Ok;
    let last = history.events().iter().rev().find(|event| granted(event.op, event.phase))?;
    last.proc.parse().ok()
}

/// Twenty processes take three permits in turns, and holders are killed. `lasts`: how much longer than a ttl the store keeps
/// what a dead process had.
async fn twenty_share_three_permits(store: &str, lasts: Duration) {
    let (dir, kills) = (TempDir::new("semaphore"), times(40, 6));
    let story = dir.join("history");
    let args = [
        format!("store={store}"),
        "name=pool".into(),
        format!("permits={PERMITS}"),
        format!("ttl_ms={}", TTL.as_millis()),
        format!("history={}", story.display()),
    ];
    let keeper = Lockkeeper::open(store).await.unwrap();
    let control = Control::start(store);
    let mut crowd = Crowd::alike("semaphore", 20, &args);
    let all_have_begun = Instant::now() + PATIENCE;
    let read = || History::read(&story).unwrap_or_default();
    loop {
        let begun: BTreeSet<String> = read().events().iter().map(|event| event.proc.clone()).collect();
        if begun.len() == 20 {
            break;
        }
        assert!(Instant::now() < all_have_begun, "{} of 20 processes have begun", begun.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    control.reset();
    let from = SystemClock.now().as_nanos();
    for _ in 0..kills {
        crowd.kill_one(holder(&read()));
        // Until all permits are held again, so that the times without them do not run into each other.
        let patience = Instant::now() + PATIENCE;
        while held_now(&read(), &crowd.killed) < PERMITS {
            assert!(Instant::now() < patience, "not all permits are held again after a kill");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    // A store that sees a death at once gets through the kills in a moment: go on until there is enough to judge.
    let patience = Instant::now() + PATIENCE;
    while read().events().iter().filter(|event| event.phase == OperationPhase::Ok).count() < 60 {
        assert!(Instant::now() < patience, "there are too few holds to judge");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let until = SystemClock.now().as_nanos();
    let slow = control.longest();
    let killed = crowd.killed.clone();
    drop(crowd);
    let history = told_until(&story, &killed, until);
    let demand = Demand { operations: 24, faults: kills / 2, contended: 10 };
    history::verdict(&history, demand, killed.len() as u64, history::laws(&history)).assert_green();
    // A dead holder's lease, then the store's bound. Between two holds there is a hand-off, which takes what the machine takes.
    let longest = longest_with_fewer(&held_times(&history), from, until);
    let bound = TTL + lasts + keeper.profile().wake + slow * 5 + Duration::from_secs(1);
    assert!(longest <= bound, "fewer than {PERMITS} were busy for {longest:?}, and the bound is {bound:?}");
    println!(
        "{store}: {} holds, {} kills, fewer than {PERMITS} busy for {longest:?} at most; the bound was {bound:?}",
        held_times(&history).len(),
        killed.len()
    );
    // What the dead had ends with its ttl, and nothing else is left.
    drop(control);
    let patience = Instant::now() + PATIENCE;
    while keeper.inspect("pool").await.unwrap().is_some() {
        assert!(Instant::now() < patience, "a permit is left: {:?}", keeper.inspect("pool").await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Sixteen readers and two writers for a while, until each of them has had the lock.
async fn readers_and_writers(store: &str) {
    let dir = TempDir::new("rw");
    let story = dir.join("history");
    let args = (0..18).map(|n| {
        vec![
            format!("store={store}"),
            "name=catalogue".into(),
            format!("role={}", if n < 2 { "writer" } else { "reader" }),
            // Longer than the test: only the killed at its end leave a lease.
            "ttl_ms=60000".into(),
            format!("history={}", story.display()),
        ]
    });
    let crowd = Crowd::new("rw_lock", args.collect());
    let (end, patience) = (Instant::now() + Duration::from_secs(times(10, 3)), Instant::now() + PATIENCE);
    loop {
        let told = History::read(&story).unwrap_or_default();
        let granted = |event: &&lockkeeper_testkit::history::HistoryEvent| {
            event.op == Operation::Acquire && event.phase == OperationPhase::Ok
        };
        let had: BTreeSet<&str> = told.events().iter().filter(granted).map(|event| &*event.proc).collect();
        if had.len() == 18 && Instant::now() > end {
            break;
        }
        assert!(Instant::now() < patience, "{} of 18 processes have had the lock", had.len());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let until = SystemClock.now().as_nanos();
    drop(crowd);
    let history = told_until(&story, &[], until);
    let demand = Demand { operations: 36, faults: 0, contended: 10 };
    history::verdict(&history, demand, 0, history::laws(&history)).assert_green();
    let grants = |shared: bool| {
        let shared =
            move |mode: Option<history::HoldKind>| (mode == Some(history::HoldKind::Shared)) == shared;
        let events = history.events().iter();
        events
            .filter(|e| e.op == Operation::Acquire && e.phase == OperationPhase::Ok && shared(e.mode))
            .count()
    };
    println!("{store}: {} reads, {} writes", grants(true), grants(false));
    assert!(grants(true) >= 16 && grants(false) >= 2);
    // The killed leave their leases, which last for a minute: nothing is left when they are over.
    if times(1, 0) == 1 {
        let (keeper, patience) = (Lockkeeper::open(store).await.unwrap(), Instant::now() + PATIENCE);
        while keeper.inspect("catalogue").await.unwrap().is_some() {
            assert!(Instant::now() < patience, "left: {:?}", keeper.inspect("catalogue").await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_processes_share_three_permits_of_a_file() {
    let dir = TempDir::new("semaphore-store");
    twenty_share_three_permits(&format!("sqlite:{}", dir.join("locks.db").display()), Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_processes_share_three_permits_of_redis() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    twenty_share_three_permits(&format!("redis://{}", server.addr()), Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_processes_share_three_permits_of_postgres() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = format!("postgres://postgres@{}/postgres?timeout=20s", server.addr());
    twenty_share_three_permits(&store, Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_processes_share_three_permits_of_etcd() {
    let Ok(()) = servers::only_with_full() else { return };
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = format!("etcd://{}?timeout=20s", server.addr());
    twenty_share_three_permits(&store, Duration::from_millis(1500)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_both_progress_on_a_file() {
    let dir = TempDir::new("rw-store");
    readers_and_writers(&format!("sqlite:{}", dir.join("locks.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_both_progress_on_redis() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    readers_and_writers(&format!("redis://{}", server.addr())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_both_progress_on_postgres() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    readers_and_writers(&format!("postgres://postgres@{}/postgres?timeout=20s", server.addr())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_both_progress_on_etcd() {
    let Ok(()) = servers::only_with_full() else { return };
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    readers_and_writers(&format!("etcd://{}?timeout=20s", server.addr())).await;
}
