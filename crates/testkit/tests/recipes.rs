//! The recipes, by real processes that are killed, on real stores.

use std::collections::{HashMap, HashSet};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lockkeeper::Lockkeeper;
use lockkeeper_testkit::servers::{self, EtcdOptions, RedisOptions, TempDir};

/// A smaller number, unless the long suites are wanted.
fn times(full: u64, usual: u64) -> u64 {
    if std::env::var_os("LOCKKEEPER_FULL").is_some() { full } else { usual }
}

fn recipe(what: &str, args: &[String]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_recipe"))
        .arg(what)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// Sixteen processes count together in one register.
async fn sixteen_count(store: &str) {
    let (processes, times) = (16, times(1000, 100));
    let started = Instant::now();
    let args = [format!("store={store}"), "name=visits".into(), format!("times={times}")];
    let children: Vec<Child> = (0..processes).map(|_| recipe("add", &args)).collect();
    let mut conflicts = 0;
    for child in children {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{done:?}");
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        conflicts += said.trim().strip_prefix("conflicts ").unwrap().parse::<u64>().unwrap();
    }
    let keeper = Lockkeeper::open(store).await.unwrap();
    let counted = keeper.register::<u64>("visits").read().await.unwrap().unwrap();
    assert_eq!(counted.value, processes * times, "increments were lost, or counted twice");
    assert!(conflicts > 0, "they never met: the test shows nothing");
    println!("{store}: {} increments, {conflicts} conflicts, {:?}", counted.value, started.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_a_file_and_lose_none() {
    let dir = TempDir::new("register");
    sixteen_count(&format!("sqlite:{}", dir.join("locks.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_redis_and_lose_none() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    sixteen_count(&format!("redis://{}", server.addr())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_processes_count_in_etcd_and_lose_none() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    sixteen_count(&format!("etcd://{}?timeout=20s", server.addr())).await;
}

/// A number below `n`, by the operating system's dice.
fn below(n: usize) -> usize {
    let [a, b, c, d, ..] = lockkeeper_host::random_128();
    u32::from_ne_bytes([a, b, c, d]) as usize % n
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_is_done_once_while_runners_are_killed() {
    let (processes, keys) = (12, times(1000, 120));
    let dir = TempDir::new("once");
    let file = |name: &str| dir.join(name).display().to_string();
    std::fs::create_dir(dir.join("effects")).unwrap();
    let args = [
        format!("store=sqlite:{}", file("locks.db")),
        format!("keys={keys}"),
        format!("dir={}", file("effects")),
        format!("results={}", file("results")),
    ];
    let mut children: Vec<Child> = (0..processes).map(|_| recipe("once", &args)).collect();
    let mut kills = 0;
    // Each one killed begins again with the first key; when enough were, the rest may come to its end.
    while kills < times(120, 25) {
        std::thread::sleep(Duration::from_millis(40 + below(120) as u64));
        let at = below(children.len());
        if children[at].try_wait().unwrap().is_none() {
            children[at].kill().unwrap();
            children[at].wait().unwrap();
            children[at] = recipe("once", &args);
        }
        kills += 1;
    }
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let results = std::fs::read_to_string(dir.join("results")).unwrap();
    let mut seen: HashMap<&str, HashSet<&str>> = HashMap::new();
    for line in results.lines() {
        let (key, result) = line.split_once(' ').unwrap();
        seen.entry(key).or_default().insert(result);
    }
    assert_eq!(seen.len() as u64, keys);
    for (key, results) in &seen {
        assert_eq!(results.len(), 1, "the callers of {key} got different results: {results:?}");
        let effect = std::fs::read_to_string(dir.join("effects").join(key)).unwrap();
        assert_eq!(results.iter().next().unwrap().split(' ').next(), Some(effect.as_str()));
    }
    let runs = std::fs::read_to_string(dir.join("effects/runs")).unwrap();
    let again = runs.lines().count() as u64 - keys;
    assert!(again > 0, "nobody was killed in the middle of a run: the test shows nothing");
    println!("{keys} keys, {kills} kills, {} answers, {again} runs were taken over", results.lines().count());
}
