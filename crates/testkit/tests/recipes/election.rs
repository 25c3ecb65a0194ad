use std::collections::BTreeMap;
use std::process::Child;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockkeeper::Lockkeeper;
use lockkeeper_testkit::servers::{self, AppendOnly, RedisOptions, TempDir};

use super::crowd::{below, recipe, times};

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
