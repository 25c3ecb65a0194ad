//! Elections among processes that are killed, stopped and restarted.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockkeeper::election::Proclamation;
use lockkeeper::{Clock, Lockkeeper, SystemClock};
use lockkeeper_testkit::history::{self, Demand};
use lockkeeper_testkit::servers::{self, AppendOnly, EtcdOptions, RedisOptions, Server, TempDir};

use super::control::Control;
use super::crowd::{Crowd, below, history_of, times};

const TTL: Duration = Duration::from_secs(1);
/// Past the ttl. Not for ever: on a file, a process that is stopped in the middle of a transaction blocks all others.
const PAUSE: Duration = Duration::from_secs(2);

/// A process believed to lead, at some moment between these.
#[derive(Clone, Copy, Debug)]
struct Look {
    term: u64,
    before: u64,
    after: u64,
    pid: u32,
}

/// What the candidates have written down so far.
struct Looks(PathBuf);

impl Looks {
    fn all(&self) -> Vec<Look> {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        text.lines().filter_map(Self::parse).collect()
    }

    fn parse(line: &str) -> Option<Look> {
        // A kill may leave half a line.
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [term, before, after, pid] = numbers[..] else { return None };
        Some(Look { term, before, after, pid: u32::try_from(pid).ok()? })
    }

    /// The first look from `since` on, in a term after `term`. Until then `meanwhile` is called again and again.
    fn first(&self, since: u64, term: u64, mut meanwhile: impl FnMut()) -> Look {
        let patience = Instant::now() + Duration::from_secs(120);
        loop {
            let all = self.all();
            let found = all.iter().filter(|look| look.before >= since && look.term > term);
            if let Some(look) = found.min_by_key(|look| look.before) {
                return *look;
            }
            assert!(Instant::now() < patience, "no leader was elected for two minutes");
            meanwhile();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// No older term is believed in after a newer one has begun, in whatever order they are looked at.
fn assert_one_leader_at_a_time(looks: &[Look]) -> usize {
    let mut terms: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for look in looks {
        let (begun, believed) = terms.entry(look.term).or_insert((look.after, look.before));
        (*begun, *believed) = ((*begun).min(look.after), (*believed).max(look.before));
    }
    let mut newer_begun = u64::MAX;
    for (term, (begun, believed)) in terms.iter().rev() {
        assert!(*believed < newer_begun, "term {term} was believed in after a newer one had begun");
        newer_begun = newer_begun.min(*begun);
    }
    terms.len()
}

/// Hears everything until the end.
async fn hear(
    mut news: impl StreamExt<Item = lockkeeper::Result<Proclamation>> + Unpin,
) -> Vec<Proclamation> {
    let mut heard = Vec::new();
    while heard.last().is_none_or(|last: &Proclamation| last.value.as_deref() != Some("the end")) {
        // The store is unreachable now and then.
        if let Some(Ok(next)) = news.next().await {
            heard.push(next);
        }
    }
    let order: Vec<_> = heard.iter().map(|p| (p.term, p.number)).collect();
    assert!(order.is_sorted_by(|a, b| a < b), "an observer heard something twice, or out of order");
    heard
}

/// Where they meet, and what that store says of itself beside its profile.
struct Ground {
    store: String,
    server: Option<Server>,
    /// How much longer than a ttl it keeps what a dead process had.
    lasts: Duration,
    /// How much longer it takes if the first waiter is stopped and has to be passed over.
    passed_over: Duration,
}

/// Five candidates. Round by round the leader is killed or stopped past its ttl, some of the waiters as well, or the store is
/// killed and started again; and each time there is a leader again within the bound.
async fn five_candidates(ground: Ground) {
    let Ground { store, mut server, lasts, passed_over } = ground;
    let (dir, started) = (TempDir::new("election"), Instant::now());
    let (looks, story) = (Looks(dir.join("looks")), dir.join("history"));
    let args = [
        format!("store={store}"),
        "name=e".into(),
        format!("ttl_ms={}", TTL.as_millis()),
        format!("file={}", looks.0.display()),
        format!("history={}", story.display()),
    ];
    let mut crowd = Crowd::alike("lead", 5, &args);
    let control = Control::start(&store);
    let keeper = Lockkeeper::open(&store).await.unwrap();
    let wake = keeper.profile().wake;
    let election = keeper.election("e").poll(Duration::from_millis(50));
    // One observer reads all the time; another one reads the first proclamation, and nothing more until the end.
    let listens = tokio::spawn(hear(election.observe()));
    let mut away = election.observe();
    let first = tokio::time::timeout(Duration::from_secs(120), away.next())
        .await
        .expect("a leader")
        .unwrap()
        .unwrap();

    let end = Instant::now() + Duration::from_secs(times(60, 8));
    let (mut rounds, mut restarts, mut slowest) = (0, 0, Duration::ZERO);
    while Instant::now() < end {
        let now = looks.first(SystemClock.now().as_nanos(), 0, || ());
        let (leader, other) = (now.pid, crowd.other_than(now.pid));
        control.reset();
        // The old lease ends, then the store's bound counts.
        let mut bound = TTL + lasts + wake;
        let old = match below(if server.is_some() { 5 } else { 4 }) {
            0 => {
                crowd.kill_one(Some(leader));
                now.term
            }
            1 => {
                crowd.stop_one(Some(leader), PAUSE);
                now.term
            }
            2 => {
                crowd.kill_one(Some(other));
                crowd.kill_one(Some(leader));
                now.term
            }
            3 => {
                bound += passed_over;
                crowd.stop_one(Some(other), PAUSE);
                crowd.kill_one(Some(leader));
                now.term
            }
            _ => {
                let server = server.as_mut().expect("there is one");
                server.kill9();
                server.restart();
                restarts += 1;
                // The leader may go on.
                0
            }
        };
        let began = SystemClock.now().as_nanos();
        let next = looks.first(began, old, || crowd.go_on());
        let took = Duration::from_nanos(next.after - began);
        // Nothing is quicker than the machine and the store are just then.
        bound += control.longest() * 2 + Duration::from_millis(200);
        assert!(took <= bound, "round {rounds}: a leader after {took:?}, and the bound is {bound:?}");
        (rounds, slowest) = (rounds + 1, slowest.max(took));
    }
    let (killed, stops) = (crowd.killed.clone(), crowd.stops);
    drop(crowd);
    let ended = SystemClock.now().as_nanos();

    // The last word, so that the observers know the end; and the truth for one who comes only now.
    let last = loop {
        match election.clone().ttl(Duration::from_secs(600)).campaign("the end").await {
            Ok(leader) => break leader,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    };
    let hears = |heard| tokio::time::timeout(Duration::from_secs(60), heard);
    let heard = hears(listens).await.expect("it hears the end").unwrap();
    let back = hears(tokio::spawn(hear(away))).await.expect("it hears the end").unwrap();
    for heard in [&heard, &back] {
        assert_eq!(heard.last().map(|p| p.term), Some(last.term()), "not the truth");
    }
    assert!(
        back[0].term >= first.term && back.iter().filter(|p| p.missed).count() <= 1,
        "a gap is told once"
    );
    assert_eq!(election.leader().await.unwrap().unwrap().term, last.term());

    drop(control);
    last.resign().await.unwrap();

    let terms = assert_one_leader_at_a_time(&looks.all());
    let all_killed: Vec<_> =
        killed.iter().copied().chain(looks.all().iter().map(|look| (look.pid, ended))).collect();
    let history = history_of(&story, &all_killed);
    let faults = killed.len() as u64 + stops + restarts;
    let demand = Demand { operations: terms, faults: 3, contended: 2 };
    history::verdict(&history, demand, faults, history::laws(&history)).assert_green();
    println!(
        "{store}: {:?}, {terms} terms, {rounds} rounds, {} kills, {stops} stops, {restarts} restarts, {} heard; the slowest new leader \
         after {slowest:?}",
        started.elapsed(),
        killed.len(),
        heard.len()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_candidates_on_a_file_never_lead_together() {
    let dir = TempDir::new("election-store");
    five_candidates(Ground {
        store: format!("sqlite:{}", dir.join("locks.db").display()),
        server: None,
        lasts: Duration::ZERO,
        passed_over: Duration::from_secs(3),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_candidates_on_a_redis_that_restarts_never_lead_together() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    five_candidates(Ground {
        store: format!("redis://{}?poll=250ms&claim=500ms", server.addr()),
        server: Some(server),
        lasts: Duration::ZERO,
        passed_over: Duration::ZERO,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_candidates_on_an_etcd_that_restarts_never_lead_together() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    five_candidates(Ground {
        store: format!("etcd://{}?poll=250ms&claim=2s", server.addr()),
        server: Some(server),
        // A second more, and half a second until etcd looks for leases that are over.
        lasts: Duration::from_millis(1500),
        passed_over: Duration::from_secs(1),
    })
    .await;
}
