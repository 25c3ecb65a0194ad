//! The recipes, by real processes that are killed, on real stores.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockkeeper::{Clock, Lockkeeper, SystemClock};
use lockkeeper_testkit::servers::{self, AppendOnly, EtcdOptions, RedisOptions, TempDir};

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

/// Twelve processes whose clocks are up to five seconds off, and a window every minute of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twelve_processes_with_clocks_that_differ_run_each_window_once() {
    let count = times(1000, 60);
    let dir = TempDir::new("windows");
    let file = dir.join("runs");
    let start = SystemClock.now().as_nanos();
    let children: Vec<Child> = (0..12)
        .map(|i| {
            let offset_ms = -5000 + i * 10_000 / 11;
            let args = [
                format!("store=sqlite:{}", dir.join("locks.db").display()),
                format!("windows={count}"),
                format!("file={}", file.display()),
                format!("start_ns={start}"),
                format!("offset_ms={offset_ms}"),
            ];
            recipe("windows", &args)
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let runs = std::fs::read_to_string(&file).unwrap();
    let numbers: Vec<u64> = runs.lines().map(|l| l.split(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(
        numbers,
        (0..count).collect::<Vec<_>>(),
        "a window was run twice, or not at all, or out of order"
    );
}

/// What was seen of one term.
#[derive(Default)]
struct Term {
    /// Somebody had been elected by then.
    begun: u64,
    /// Somebody still believed in it after that.
    believed: u64,
    looks: u64,
}

fn terms(file: &std::path::Path) -> BTreeMap<u64, Term> {
    let mut terms: BTreeMap<u64, Term> = BTreeMap::new();
    for line in std::fs::read_to_string(file).unwrap().lines() {
        // A kill may leave half a line.
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [number, before, after] = numbers[..] else { continue };
        let term = terms.entry(number).or_insert_with(|| Term { begun: after, ..Term::default() });
        term.begun = term.begun.min(after);
        term.believed = term.believed.max(before);
        term.looks += 1;
    }
    terms
}

/// No older term is believed in after a newer one has begun.
fn assert_one_leader_at_a_time(terms: &BTreeMap<u64, Term>) {
    let mut newer_begun = u64::MAX;
    for (number, term) in terms.iter().rev() {
        assert!(term.believed < newer_begun, "term {number} was believed in after a newer one had begun");
        newer_begun = newer_begun.min(term.begun);
    }
}

/// Five candidates, of whom one is killed, or stopped past its ttl, again and again; `trouble` befalls the store.
async fn five_candidates(store: &str, mut trouble: impl FnMut(u64)) {
    let dir = TempDir::new("election");
    let file = dir.join("terms");
    let args =
        [format!("store={store}"), "name=e".into(), "ttl_ms=1000".into(), format!("file={}", file.display())];
    let mut children: Vec<Child> = (0..5).map(|_| recipe("lead", &args)).collect();
    let keeper = Lockkeeper::open(store).await.unwrap();
    let mut news = keeper.election("e").poll(Duration::from_millis(50)).observe();
    let heard = tokio::spawn(async move {
        let mut heard = Vec::new();
        while let Some(next) = news.next().await {
            // The store is away now and then.
            if let Ok(next) = next {
                heard.push((next.term, next.number));
                if next.value.as_deref() == Some("the end") {
                    return heard;
                }
            }
        }
        heard
    });
    let end = Instant::now() + Duration::from_secs(times(60, 10));
    let (mut kills, mut stops, mut round) = (0, 0, 0);
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100 + below(300) as u64));
        let at = below(children.len());
        if below(2) == 0 {
            children[at].kill().unwrap();
            children[at].wait().unwrap();
            children[at] = recipe("lead", &args);
            kills += 1;
        } else {
            let pid = rustix::process::Pid::from_raw(children[at].id() as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            std::thread::sleep(Duration::from_millis(1300));
            rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
            stops += 1;
        }
        trouble(round);
        round += 1;
    }
    for mut child in children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // The last word, so that the observer knows the end; and the truth for one who comes only now.
    let last = loop {
        match keeper.election("e").ttl(Duration::from_secs(600)).campaign("the end").await {
            Ok(leader) => break leader,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    };
    let heard =
        tokio::time::timeout(Duration::from_secs(60), heard).await.expect("it hears the end").unwrap();
    assert!(heard.is_sorted_by(|a, b| a < b), "the observer heard something twice, or out of order");
    assert_eq!(heard.last().map(|(term, _)| *term), Some(last.term()));
    assert_eq!(keeper.election("e").leader().await.unwrap().unwrap().term, last.term());
    let terms = terms(&file);
    assert_one_leader_at_a_time(&terms);
    assert!(terms.len() > 2 && kills + stops > 2, "nothing happened: {} terms", terms.len());
    let looks: u64 = terms.values().map(|term| term.looks).sum();
    println!(
        "{store}: {} terms, {looks} looks, {kills} kills, {stops} stops, {} heard",
        terms.len(),
        heard.len()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_candidates_on_a_file_never_lead_together() {
    let dir = TempDir::new("election-store");
    five_candidates(&format!("sqlite:{}", dir.join("locks.db").display()), |_| ()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_candidates_on_a_redis_that_restarts_never_lead_together() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut server) = servers::redis(options) else { return };
    let url = format!("redis://{}", server.addr());
    five_candidates(&url, |round| {
        if round % 5 == 4 {
            server.kill9();
            server.restart();
        }
    })
    .await;
}
