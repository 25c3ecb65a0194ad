//! Decisions of one rate limit, 64 tasks at once: against a bare GCRA script, and against a lock, a read, a write and an unlock for each decision.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::limit::{BucketSpec, LimitBucket, LimitOperation, LimitRequest, Rate};
use lockkeeper_core::{AcquireOutcome, Attempt, Holder, Limits, LockName, LockRequest, Locks, Wait};
use lockkeeper_redis::{Options, RedisStore};
use redis::aio::MultiplexedConnection;

use crate::throughput::measure;
use crate::{median, median_ratio};

/// The algorithm as many applications have it: one key, microseconds, no remainder, no refund.
const BARE: &str = "
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local tat = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now) + ARGV[1]
if tat - ARGV[2] > now then return { 0, tat - ARGV[2] - now } end
redis.call('SET', KEYS[1], string.format('%.0f', tat), 'PX', math.ceil((tat - now) / 1000))
return { 1, tat - now }";
/// A token each microsecond, and a second of them.
const TOKEN_MICROS: u64 = 1;
const FILL_MICROS: u64 = 1_000_000;

pub async fn run(addr: SocketAddr, rounds: usize) {
    let client = redis::Client::open(format!("redis://{addr}")).expect("an address");
    let connection = client.get_multiplexed_async_connection().await.expect("a connection");
    let options = Options::from_url(&format!("redis://{addr}")).expect("an address");
    let store = Arc::new(RedisStore::open(options).await.expect("a store"));
    let (mut ours, mut bare, mut locked) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        bare.push(measure(|_, stop, count| script(connection.clone(), stop, count)).await);
        ours.push(measure(|_, stop, count| takes(store.clone(), stop, count)).await);
        locked.push(
            measure(|task, stop, count| lock(store.clone(), connection.clone(), task, stop, count)).await,
        );
    }
    let ratio = |peer: &[f64]| median_ratio(&ours, peer);
    let (to_bare, to_locked) = (ratio(&bare), ratio(&locked));
    let (ours, bare, locked) = (median(ours), median(bare), median(locked));
    println!(
        "rate limit, 64 tasks, one key: bare GCRA script {bare:.0}/s, take {ours:.0}/s, lock, read, write, unlock {locked:.0}/s"
    );
    println!(
        "  ratio {to_bare:.2} to the bare script (goal: at least 0.7), {to_locked:.0} to the lock (goal: at least 20)"
    );
}

async fn script(mut connection: MultiplexedConnection, stop: Arc<AtomicBool>, count: Arc<AtomicU64>) {
    let script = redis::Script::new(BARE);
    while !stop.load(Ordering::Relaxed) {
        let mut call = script.key("bare:limit");
        call.arg(TOKEN_MICROS).arg(FILL_MICROS);
        let (_, _): (u64, f64) = call.invoke_async(&mut connection).await.expect("an answer");
        count.fetch_add(1, Ordering::Relaxed);
    }
}

async fn takes(store: Arc<RedisStore>, stop: Arc<AtomicBool>, count: Arc<AtomicU64>) {
    let rate = Rate::new(1, Duration::from_micros(TOKEN_MICROS)).expect("a rate");
    let key = LockName::new("limit/hot").expect("a name");
    let spec = BucketSpec::new(key, rate, FILL_MICROS / TOKEN_MICROS).expect("a bucket");
    let operation = LimitOperation::Take { wait: Duration::ZERO };
    let request = LimitRequest { operation, buckets: vec![LimitBucket { spec, tokens: 1, taken: 0 }] };
    while !stop.load(Ordering::Relaxed) {
        store.limit(&request).await.expect("an answer");
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The same limit, kept by a program that has a lock and no rate limit.
async fn lock(
    store: Arc<RedisStore>,
    mut connection: MultiplexedConnection,
    task: u64,
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
) {
    let name = LockName::new("limit/locked").expect("a name");
    let holder = Arc::new(Holder::new("bench", 1, None).expect("a holder"));
    let mut turn = 0u64;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        let attempt = Attempt::from_bytes((u128::from(task) << 64 | u128::from(turn)).to_be_bytes());
        let mut request = LockRequest::new(attempt, name.clone(), Duration::from_secs(30), holder.clone());
        request.wait = Wait::Forever;
        let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request).await else { panic!("not granted") };
        let mut get = redis::cmd("GET");
        let found: Option<u64> =
            get.arg("locked:limit").query_async(&mut connection).await.expect("an answer");
        let mut set = redis::cmd("SET");
        set.arg("locked:limit").arg(found.unwrap_or(0) + 1);
        let () = set.query_async(&mut connection).await.expect("an answer");
        store.release(&grant.key).await.expect("an answer");
        count.fetch_add(1, Ordering::Relaxed);
    }
}
