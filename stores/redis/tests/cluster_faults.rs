//! A cluster with replicas under load while a primary fails over, is silent, is gone, or migrates a slot. Locks that are held and requested
//! for at the other primaries is not harmed, the primary's own locks can be had again, and nothing is left behind.
//!
//! Each fault lasts for 30 s with `LOCKKEEPER_FULL`, and for two ttls without.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::{Client, keeper, open, tell};
use lockkeeper::{Guard, Lockkeeper};
use lockkeeper_core::Error;
use lockkeeper_testkit::laws::{eventually, request, soon};
use lockkeeper_testkit::servers::{self, RedisCluster, RedisOptions, redis_call};
use tokio::task::JoinSet;

const TTL: Duration = Duration::from_secs(4);
/// The primary that has the fault.
const FAULTY: usize = 1;
const PRIMARIES: usize = 3;
const NODE_TIMEOUT: Duration = Duration::from_secs(2);

fn fault_time() -> Duration {
    if std::env::var_os("LOCKKEEPER_FULL").is_some() { Duration::from_secs(30) } else { 2 * TTL }
}

fn cluster() -> Option<RedisCluster> {
    let timeout = NODE_TIMEOUT.as_millis().to_string();
    let extra = [("cluster-require-full-coverage", "no"), ("cluster-node-timeout", &timeout)];
    let extra = extra.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    servers::redis_cluster_with_replicas(PRIMARIES, RedisOptions { extra, ..RedisOptions::default() }).ok()
}

/// One lock that several tasks want all the time.
struct Contended {
    name: String,
    node: usize,
    taken: AtomicBool,
    grants: AtomicU64,
}

/// Guards that are held all along, and tasks that take other locks in turns.
struct Load {
    store: Client,
    guards: Vec<(usize, Guard)>,
    names: Vec<String>,
    contended: Vec<Arc<Contended>>,
    /// The fault does not hurt this primary's locks, so neither may it lose one.
    harmless: bool,
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Load {
    async fn start(cluster: &RedisCluster, harmless: bool) -> Load {
        let seeds: Vec<String> = cluster.addrs().iter().map(ToString::to_string).collect();
        let url = format!("redis+cluster://{}?claim=2s&timeout=1s", seeds.join(","));
        let (store, other) = (open(&url).await, open(&url).await);
        let (keeper, other) = (keeper(&store), keeper(&other));
        let (mut guards, mut names, mut contended) = (Vec::new(), Vec::new(), Vec::new());
        let (stop, mut tasks) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        for node in 0..PRIMARIES {
            let here = |text: &String| cluster.node_of_slot(cluster.slot_of(&format!("lock:{text}"))) == node;
            let mut found = (0..).map(|i| format!("orders/{i}")).filter(here);
            for (nth, text) in found.by_ref().take(8).enumerate() {
                let lock = keeper.lock(&text).ttl(TTL);
                // Half of them are in a hash.
                let lock = if nth % 2 == 0 { lock } else { lock.shared() };
                guards.push((node, lock.acquire().await.unwrap()));
                names.push(text);
            }
            for name in found.take(2) {
                names.push(name.clone());
                let (taken, grants) = (AtomicBool::new(false), AtomicU64::new(0));
                let one = Arc::new(Contended { name, node, taken, grants });
                for keeper in [&keeper, &other, &other] {
                    let sick = node == FAULTY && !harmless;
                    tasks.spawn(contend(keeper.clone(), one.clone(), sick, stop.clone()));
                }
                contended.push(one);
            }
        }
        Load { store, guards, names, contended, harmless, stop, tasks }
    }

    fn grants(&self) -> Vec<(usize, u64)> {
        self.contended.iter().map(|one| (one.node, one.grants.load(SeqCst))).collect()
    }

    /// Waits until every lock that several tasks want was granted once more, at the primaries that are to work.
    async fn goes_on(&self, what: &str, at: impl Fn(usize) -> bool) {
        let before = self.grants();
        eventually(what, || async {
            let now = self.grants();
            now.iter().zip(&before).all(|((node, now), (_, before))| !at(*node) || now > before)
        })
        .await;
    }

    /// Lets the fault last, and looks at the guards all the time.
    async fn bear(&self) {
        let until = Instant::now() + fault_time();
        while Instant::now() < until {
            self.goes_on("the other primaries grant", |node| node != FAULTY).await;
            for (node, guard) in &self.guards {
                let unharmed = *node != FAULTY || self.harmless;
                assert!(!unharmed || guard.is_held(), "{guard:?} at {node}: {:?}", guard.loss_reason());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The fault is over: all locks can be had everywhere, and when all is released, no key is left but the counters of fences and
    /// what expires by itself.
    async fn end(mut self, cluster: &RedisCluster) {
        self.goes_on("every lock is granted again", |_| true).await;
        self.stop.store(true, SeqCst);
        while let Some(ended) = soon("the tasks end", self.tasks.join_next()).await {
            ended.unwrap();
        }
        for (node, guard) in std::mem::take(&mut self.guards) {
            let held = guard.is_held();
            let released = soon("a release ends", guard.release()).await;
            let unharmed = node != FAULTY || self.harmless;
            assert!(!unharmed || (held && released.is_ok()), "at {node}: {released:?}");
        }
        for text in &self.names {
            eventually("it can be had", || async {
                let asked = request(text);
                let answer = self.store.acquire(&asked).await;
                let had = matches!(answer, Ok(lockkeeper_core::AcquireOutcome::Granted(_)));
                had && self.store.release(&asked.key).await.is_ok()
            })
            .await;
        }
        eventually("nothing is left", || async { left(cluster).is_empty() }).await;
    }
}

/// The keys that are left for longer than they may be: no counter of fences, and no key that says "until then" by itself.
fn left(cluster: &RedisCluster) -> Vec<String> {
    let passing = |key: &str| [":fence", ":waited", ":released"].iter().any(|end| key.ends_with(end));
    let mut left = Vec::new();
    for addr in cluster.addrs() {
        let Ok(keys) = redis_call(addr, &["KEYS", "*"]) else { return vec![format!("{addr} is silent")] };
        left.extend(keys.lines().filter(|key| !passing(key) && !key.contains(":released:")).map(Into::into));
    }
    left
}

/// Takes a lock again and again. At a primary without a fault no request may fail, and no two tasks hold the lock.
async fn contend(keeper: Lockkeeper, one: Arc<Contended>, sick: bool, stop: Arc<AtomicBool>) {
    while !stop.load(SeqCst) {
        let guard = match keeper.lock(&one.name).ttl(TTL).wait(Duration::from_secs(30)).acquire().await {
            Ok(guard) => guard,
            Err(Error::Unavailable(_) | Error::Unknown(_) | Error::Busy(_)) if sick => continue,
            Err(error) => panic!("{} at a primary without a fault: {error:?}", one.name),
        };
        if sick {
            // Redis acknowledges a write before the replica has it: a fail-over may let a second one in.
            one.grants.fetch_add(1, SeqCst);
            tokio::time::sleep(Duration::from_millis(5)).await;
            _ = guard.release().await;
            continue;
        }
        assert!(!one.taken.swap(true, SeqCst), "two hold {}", one.name);
        one.grants.fetch_add(1, SeqCst);
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(guard.is_held(), "{} was lost at a primary without a fault", one.name);
        one.taken.store(false, SeqCst);
        guard.release().await.unwrap();
    }
}

fn is_primary(cluster: &RedisCluster, nth: usize) -> bool {
    redis_call(cluster.addrs()[nth], &["ROLE"]).is_ok_and(|role| role.starts_with("master"))
}

/// Makes a replica and its primary change places. A fail-over without enough votes is given up after 5 s.
async fn change_places(cluster: &RedisCluster, replica: usize, primary: usize) {
    let changed = || is_primary(cluster, replica) && follows(cluster, primary);
    while !changed() {
        _ = redis_call(cluster.addrs()[replica], &["CLUSTER", "FAILOVER"]);
        let given_up = Instant::now() + Duration::from_secs(6);
        while !changed() && Instant::now() < given_up {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Whether a replica has what its primary has, and every node knows that it is one.
fn follows(cluster: &RedisCluster, replica: usize) -> bool {
    let replica = cluster.addrs()[replica];
    let linked = redis_call(replica, &["INFO", "replication"])
        .is_ok_and(|info| info.contains("master_link_status:up"));
    let known = |line: &str| line.contains(&replica.to_string()) && line.contains("slave");
    let knows = |addr| redis_call(addr, &["CLUSTER", "NODES"]).is_ok_and(|view| view.lines().any(known));
    linked && cluster.addrs().into_iter().all(knows)
}

/// A primary and its replica change places again and again, as an operator makes them to.
#[tokio::test(flavor = "multi_thread")]
async fn fail_over_under_load() {
    let Some(cluster) = cluster() else { return };
    let load = Load::start(&cluster, false).await;
    let until = Instant::now() + fault_time();
    let mut next = FAULTY + PRIMARIES;
    while Instant::now() < until {
        let before = if next == FAULTY { FAULTY + PRIMARIES } else { FAULTY };
        soon("a fail-over ends", change_places(&cluster, next, before)).await;
        load.goes_on("all primaries grant", |_| true).await;
        // The primaries vote about one primary at most once in two node timeouts.
        tokio::time::sleep(5 * NODE_TIMEOUT / 2).await;
        next = before;
    }
    load.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_is_silent_under_load() {
    let Some(cluster) = cluster() else { return };
    let load = Load::start(&cluster, false).await;
    cluster.nodes()[FAULTY].pause();
    load.bear().await;
    load.goes_on("the replica grants", |_| true).await;
    cluster.nodes()[FAULTY].resume();
    eventually("the old primary follows", || async { !is_primary(&cluster, FAULTY) }).await;
    load.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_is_gone_under_load() {
    let Some(mut cluster) = cluster() else { return };
    let load = Load::start(&cluster, false).await;
    cluster.node_mut(FAULTY).kill9();
    load.bear().await;
    load.goes_on("the replica grants", |_| true).await;
    cluster.node_mut(FAULTY).restart();
    eventually("the old primary follows", || async { !is_primary(&cluster, FAULTY) }).await;
    load.end(&cluster).await;
}

/// The slot of a guard moves, and a part of its keys has moved. The locks of all other slots go on, at the same primary too.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_moves_under_load() {
    let Some(cluster) = cluster() else { return };
    let load = Load::start(&cluster, true).await;
    let mut moving = Vec::new();
    // A plain guard and a shared one.
    for (_, guard) in load.guards.iter().filter(|(node, _)| *node == FAULTY).take(2) {
        let text = guard.names().iter().next().unwrap().to_string();
        let slot = cluster.slot_of(&format!("lock:{text}"));
        moving.push(cluster.begin_migration(slot, 2));
        let port = cluster.addrs()[2].port().to_string();
        let key = format!("lock:{text}");
        tell(cluster.addrs()[FAULTY], &["MIGRATE", "127.0.0.1", &port, &key, "0", "1000"]);
    }
    load.bear().await;
    load.goes_on("the other slots of the primary too", |_| true).await;
    for migration in moving {
        cluster.finish_migration(migration);
    }
    load.end(&cluster).await;
}
