//! Taking and giving back free locks, one task or many at once, each with names of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::{AcquireOutcome, Attempt, Holder, LockName, LockRequest, Locks};
use lockkeeper_postgres::{Options, PostgresStore};
use tokio_postgres::Client;

use crate::bare::{self, Words};
use crate::{median, median_ratio};

const ROUND: Duration = Duration::from_millis(500);
/// How many connections a usual pool has.
const POOL: usize = 10;

pub async fn run(addr: SocketAddr, tasks: usize, goal: f64, rounds: usize) {
    let mut pool = Vec::new();
    for _ in 0..tasks.min(POOL) {
        let client = Arc::new(bare::connect(addr).await);
        let words = Words::of(&client, true).await;
        pool.push((client, words));
    }
    let hasty = Words::of(&pool[0].0, false).await;
    let (own, here) = (open(addr, "own").await, open(addr, "caller").await);
    let (mut bare, mut pooled, mut loose) = (Vec::new(), Vec::new(), Vec::new());
    let (mut by_own, mut by_here) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let by = |count: usize| {
            let pool = pool.clone();
            move |task: usize, stop, done| {
                let (client, words) = pool[task % count.min(pool.len())].clone();
                by_hand(client, words, task, stop, done)
            }
        };
        bare.push(measure(tasks, by(1)).await);
        pooled.push(measure(tasks, by(POOL)).await);
        let by_hasty = |task, stop, done| by_hand(pool[0].0.clone(), hasty.clone(), task, stop, done);
        loose.push(measure(tasks, by_hasty).await);
        by_here.push(measure(tasks, |task, stop, done| fenced(here.clone(), task, stop, done)).await);
        by_own.push(measure(tasks, |task, stop, done| fenced(own.clone(), task, stop, done)).await);
    }
    let usual = median(bare.clone());
    println!(
        "acquire+release, {tasks} tasks: bare upsert on one connection of the caller's runtime {usual:.0}/s"
    );
    for (place, ours) in [("the same runtime", by_here), ("a thread of its own", by_own)] {
        let (to_bare, to_pool, to_loose) =
            (median_ratio(&ours, &bare), median_ratio(&ours, &pooled), median_ratio(&ours, &loose));
        println!("  fenced, on {place} {:.0}/s: ratio {to_bare:.2} (goal: at least {goal})", median(ours));
        println!(
            "  bare, and its release does not wait for the disk either {:.0}/s: ratio {to_loose:.2}",
            median(loose.clone())
        );
        if tasks > 1 {
            println!("  bare on {POOL} connections {:.0}/s: ratio {to_pool:.2}", median(pooled.clone()));
        }
    }
}

/// A store whose connection is on this runtime, or on a thread of its own.
async fn open(addr: SocketAddr, runtime: &str) -> Arc<PostgresStore> {
    let url = format!("postgres://postgres@{addr}/postgres?runtime={runtime}");
    let options = Options::from_url(&url).expect("an address");
    Arc::new(PostgresStore::open(options).await.expect("a store"))
}

/// Cycles per second of all tasks together.
async fn measure<F: Future<Output = ()> + Send + 'static>(
    tasks: usize,
    work: impl Fn(usize, Arc<AtomicBool>, Arc<AtomicU64>) -> F,
) -> f64 {
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> =
        (0..tasks).map(|task| tokio::spawn(work(task, stop.clone(), count.clone()))).collect();
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

fn attempt(task: usize, turn: u64) -> [u8; 16] {
    ((task as u128) << 64 | u128::from(turn)).to_be_bytes()
}

async fn by_hand(
    client: Arc<Client>,
    words: Words,
    task: usize,
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
) {
    let name = format!("task/{task}");
    let mut turn = 0;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        words.take(&client, &name, &attempt(task, turn)).await;
        words.give(&client, &name, &attempt(task, turn)).await;
        count.fetch_add(1, Ordering::Relaxed);
    }
}

async fn fenced(store: Arc<PostgresStore>, task: usize, stop: Arc<AtomicBool>, count: Arc<AtomicU64>) {
    let name = LockName::new(format!("task/{task}")).expect("a name");
    let holder = Arc::new(Holder::new("bench", 1, None).expect("a holder"));
    let mut turn = 0;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        let attempt = Attempt::from_bytes(attempt(task, turn));
        let request = LockRequest::new(attempt, name.clone(), Duration::from_secs(30), holder.clone());
        let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request).await else { panic!("not granted") };
        store.release(&grant.key).await.expect("an answer");
        count.fetch_add(1, Ordering::Relaxed);
    }
}
