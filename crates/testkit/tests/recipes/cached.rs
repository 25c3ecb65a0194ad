//! 200 tasks in 8 processes that want one value at the same moment: one computes it, also if the first one is killed.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use lockkeeper::Lockkeeper;
use lockkeeper_testkit::servers::{self, EtcdOptions, PostgresOptions, RedisOptions, TempDir};
use rustix::process::{Pid, Signal, kill_process};

use super::control::Control;
use super::crowd::recipe;

const PROCESSES: usize = 8;
const TASKS: usize = 25;
/// Nothing here takes this long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(240);

/// One round of all processes.
struct Round<'a> {
    store: &'a str,
    key: &'a str,
    guarded: bool,
    lease: Duration,
    /// How long the first computation takes.
    first: Duration,
}

/// A computation: by which process, and when it began.
#[derive(Clone, Copy, Debug)]
struct Run {
    fence: u64,
    pid: u32,
    began: u64,
}

fn runs_in(file: &Path) -> Vec<Run> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let parse = |line: &str| {
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [fence, pid, began] = numbers[..] else { return None };
        Some(Run { fence, pid: u32::try_from(pid).ok()?, began })
    };
    text.lines().filter_map(parse).collect()
}

fn wait_until(what: &str, mut check: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < until, "it did not happen: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Round<'_> {
    /// Starts the processes, lets all their tasks want the value at once, and calls `meanwhile` with the file of the runs.
    /// Returns the runs, and the values that tasks got.
    fn run(&self, meanwhile: impl FnOnce(&Path)) -> (Vec<Run>, Vec<String>) {
        let dir = TempDir::new("cached");
        let file = |name: &str| dir.join(name).display().to_string();
        let args = [
            format!("store={}", self.store),
            format!("key={}", self.key),
            format!("tasks={TASKS}"),
            format!("lease_ms={}", self.lease.as_millis()),
            format!("first_ms={}", self.first.as_millis()),
            format!("guard={}", if self.guarded { "yes" } else { "no" }),
            format!("looked={}", file("looked")),
            format!("go={}", file("go")),
            format!("runs={}", file("runs")),
            format!("values={}", file("values")),
        ];
        let children: Vec<_> = (0..PROCESSES).map(|_| recipe("cached", &args)).collect();
        wait_until("every task has looked", || {
            let names = std::fs::read_dir(dir.join("runs").parent().expect("a directory")).unwrap();
            names
                .filter(|name| name.as_ref().unwrap().file_name().to_string_lossy().starts_with("looked"))
                .count()
                == PROCESSES
        });
        std::fs::File::create(dir.join("go")).unwrap();
        meanwhile(&dir.join("runs"));
        for child in children {
            child.wait_with_output().unwrap();
        }
        let values = std::fs::read_to_string(dir.join("values")).unwrap_or_default();
        (runs_in(&dir.join("runs")), values.lines().map(str::to_owned).collect())
    }

    fn tasks() -> usize {
        PROCESSES * TASKS
    }
}

fn assert_one_value(values: &[String], tasks: usize) {
    assert_eq!(values.len(), tasks, "a task got no value");
    let different: BTreeSet<_> = values.iter().collect();
    assert_eq!(different.len(), 1, "tasks got different values: {different:?}");
}

/// `lasts`: how much longer than a lease the store keeps what a dead process had.
async fn one_of_200_computes(store: &str, lasts: Duration) {
    let (long, moment) = (Duration::from_secs(600), Duration::from_millis(50));
    let keeper = Lockkeeper::open(store).await.unwrap();

    // Without the guard all of them compute.
    let bare = Round { store, key: "bare", guarded: false, lease: long, first: moment };
    let (runs, _) = bare.run(|_| ());
    assert_eq!(runs.len(), Round::tasks(), "without the guard every task computes");

    // A key that never had a value.
    let cold = Round { key: "cold", guarded: true, ..bare };
    let (runs, values) = cold.run(|_| ());
    assert_eq!(runs.len(), 1, "a cold key: {runs:?}");
    assert_one_value(&values, Round::tasks());

    // A key whose value is over.
    let brief = keeper.cached("expired").ttl(Duration::from_millis(200)).jitter(0.0);
    brief.clone().get_bytes(|_| async { Ok::<_, String>(b"old".to_vec()) }).await.unwrap();
    while brief.current().await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (runs, values) = Round { key: "expired", ..cold }.run(|_| ());
    assert_eq!(runs.len(), 1, "an expired key: {runs:?}");
    assert_one_value(&values, Round::tasks());
    assert_ne!(values[0], "old");

    // The one that computes is killed in the middle of it.
    let lease = Duration::from_secs(3);
    let control = Control::start(store);
    let mut took = (Duration::ZERO, Duration::ZERO);
    let killed = Round { key: "killed", lease, first: long, ..cold };
    let (runs, values) = killed.run(|runs| {
        wait_until("the first one computes", || !runs_in(runs).is_empty());
        let first = runs_in(runs)[0];
        control.reset();
        let now = lockkeeper::Clock::now(&lockkeeper::SystemClock).as_nanos();
        kill_process(Pid::from_raw(first.pid as i32).unwrap(), Signal::KILL).unwrap();
        wait_until("another one computes", || runs_in(runs).len() > 1);
        let waited = Duration::from_nanos(runs_in(runs)[1].began.saturating_sub(now));
        took = (
            waited,
            lease + lasts + keeper.profile().wake + control.longest() * 3 + Duration::from_millis(500),
        );
    });
    assert_eq!(runs.len(), 2, "a killed refresher: {runs:?}");
    assert!(runs[1].fence > runs[0].fence && runs[1].pid != runs[0].pid);
    assert!(took.0 <= took.1, "the others waited {:?}, and the bound is {:?}", took.0, took.1);
    assert_one_value(&values, Round::tasks() - TASKS);
    println!("{store}: a killed refresher was taken over after {:?}; the bound was {:?}", took.0, took.1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_200_tasks_computes_on_a_file() {
    let dir = TempDir::new("cached-store");
    one_of_200_computes(&format!("sqlite:{}", dir.join("locks.db").display()), Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_200_tasks_computes_on_redis() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    one_of_200_computes(&format!("redis://{}", server.addr()), Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_200_tasks_computes_on_postgres() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = format!("postgres://postgres@{}/postgres?timeout=20s", server.addr());
    one_of_200_computes(&store, Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_200_tasks_computes_on_etcd() {
    if std::env::var_os("LOCKKEEPER_FULL").is_none() {
        return println!("left out: only with LOCKKEEPER_FULL");
    }
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    // A second more, and half a second until etcd looks for leases that are over.
    let store = format!("etcd://{}?timeout=20s", server.addr());
    one_of_200_computes(&store, Duration::from_millis(1500)).await;
}
