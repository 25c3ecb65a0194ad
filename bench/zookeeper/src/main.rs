//! The ZooKeeper store against its peer, in one run on one server: only ratios count.
//!
//!     cargo run --release -p bench-zookeeper [ROUNDS]

mod zookeeper;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::{AcquireOutcome, Attempt, Holder, LockName, LockRequest, Store};
use lockkeeper_host::random_128;

/// As long as one measurement lasts.
const ROUND: Duration = Duration::from_millis(700);

#[tokio::main]
async fn main() {
    let rounds = std::env::args().nth(1).map_or(9, |text| text.parse().expect("ROUNDS is a number"));
    zookeeper::run(rounds).await;
}

/// Who waits for its work, and for how long it goes on.
#[derive(Clone, Default)]
struct Run {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
}

impl Run {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn one_more(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Cycles per second of so many tasks together.
async fn measure<F: Future<Output = ()> + Send + 'static>(tasks: u64, work: impl Fn(u64, Run) -> F) -> f64 {
    let run = Run::default();
    let tasks: Vec<_> = (0..tasks).map(|task| tokio::spawn(work(task, run.clone()))).collect();
    tokio::time::sleep(ROUND / 5).await;
    let (began, before) = (Instant::now(), run.count.load(Ordering::Relaxed));
    tokio::time::sleep(ROUND).await;
    let rate = (run.count.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64();
    run.stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("the task ends well");
    }
    rate
}

/// Takes and gives back a lock of its own, over and over.
async fn ours(store: Arc<dyn Store>, task: u64, run: Run) {
    let name = LockName::new(format!("task/{task}")).expect("a name");
    let holder = Arc::new(Holder::new("bench", 1, None).expect("a holder"));
    while run.goes_on() {
        let attempt = Attempt::from_bytes(random_128());
        let request = LockRequest::new(attempt, name.clone(), Duration::from_secs(30), holder.clone());
        let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request).await else { panic!("not granted") };
        store.release(&grant.key).await.expect("an answer");
        run.one_more();
    }
}

/// One comparison: the medians, and the median of the ratios of neighbours.
struct Pair {
    what: String,
    peer: Vec<f64>,
    ours: Vec<f64>,
}

impl Pair {
    fn new(what: impl Into<String>) -> Pair {
        Pair { what: what.into(), peer: Vec::new(), ours: Vec::new() }
    }

    fn add(&mut self, peer: f64, ours: f64) {
        self.peer.push(peer);
        self.ours.push(ours);
    }

    fn tell(&self, goal: &str) {
        let ratio = median(self.ours.iter().zip(&self.peer).map(|(ours, peer)| ours / peer).collect());
        let (peer, ours) = (median(self.peer.clone()), median(self.ours.clone()));
        println!("{}: {peer:.0}/s, ours {ours:.0}/s, ratio {ratio:.2} ({goal})", self.what);
    }
}

fn median(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list[list.len() / 2]
}
