//! Taking and giving back free locks, 64 tasks at once, each with names of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::{AcquireOutcome, Attempt, Holder, LockName, LockRequest, Locks};
use lockkeeper_redis::{Options, RedisStore};
use redis::aio::MultiplexedConnection;

use crate::{median, median_ratio};

const TASKS: u64 = 64;
const ROUND: Duration = Duration::from_millis(500);
/// The usual lock of an application: no fence, no queue, no holder.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

pub async fn run(addr: SocketAddr, rounds: usize) {
    let client = redis::Client::open(format!("redis://{addr}")).expect("an address");
    let connection = client.get_multiplexed_async_connection().await.expect("a connection");
    let options = Options::from_url(&format!("redis://{addr}")).expect("an address");
    let store = Arc::new(RedisStore::open(options).await.expect("a store"));
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        bare.push(measure(|task, stop, count| pattern(connection.clone(), task, stop, count)).await);
        ours.push(measure(|task, stop, count| fenced(store.clone(), task, stop, count)).await);
    }
    // Each round beside its neighbour: what else the machine does hits both.
    let ratio = median_ratio(&ours, &bare);
    let (ours, bare) = (median(ours), median(bare));
    println!("acquire+release, {TASKS} tasks: bare SET NX PX and script {bare:.0}/s, fenced {ours:.0}/s");
    println!("  ratio {ratio:.2} (goal: at least 0.65)");
}

/// Cycles per second of all tasks together.
pub async fn measure<F: Future<Output = ()> + Send + 'static>(
    work: impl Fn(u64, Arc<AtomicBool>, Arc<AtomicU64>) -> F,
) -> f64 {
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> =
        (0..TASKS).map(|task| tokio::spawn(work(task, stop.clone(), count.clone()))).collect();
    tokio::time::sleep(ROUND / 5).await;
    let (began, before) = (Instant::now(), count.load(Ordering::Relaxed));
    tokio::time::sleep(ROUND).await;
    let rate = (count.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("the task ends well");
    }
    rate
}

async fn pattern(
    mut connection: MultiplexedConnection,
    task: u64,
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
) {
    let script = redis::Script::new(RELEASE);
    let key = format!("bare:task/{task}");
    let mut turn = 0u64;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        let value = format!("{task:016x}{turn:016x}");
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(&value).arg("NX").arg("PX").arg(30_000);
        let taken: Option<String> = set.query_async(&mut connection).await.expect("an answer");
        assert!(taken.is_some());
        let gone: u64 = script.key(&key).arg(&value).invoke_async(&mut connection).await.expect("an answer");
        assert_eq!(gone, 1);
        count.fetch_add(1, Ordering::Relaxed);
    }
}

async fn fenced(store: Arc<RedisStore>, task: u64, stop: Arc<AtomicBool>, count: Arc<AtomicU64>) {
    let name = LockName::new(format!("task/{task}")).expect("a name");
    let holder = Arc::new(Holder::new("bench", 1, None).expect("a holder"));
    let mut turn = 0u64;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        let attempt = Attempt::from_bytes((u128::from(task) << 64 | u128::from(turn)).to_be_bytes());
        let request = LockRequest::new(attempt, name.clone(), Duration::from_secs(30), holder.clone());
        let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request).await else { panic!("not granted") };
        store.release(&grant.key).await.expect("an answer");
        count.fetch_add(1, Ordering::Relaxed);
    }
}
