//! Measures a store beside a peer in the same run: the benchmarks publish ratios only.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::{AcquireOutcome, Attempt, Holder, LockName, LockRequest, Store};
use lockkeeper_host::random_128;

/// How long one measurement lasts.
const ROUND: Duration = Duration::from_millis(700);

/// How many rounds the command line asks for: 9 by default.
///
/// # Panics
/// If the first argument is not a number.
pub fn rounds() -> usize {
    std::env::args().nth(1).map_or(9, |text| text.parse().expect("ROUNDS is a number"))
}

/// The cycles of the tasks of one measurement, and whether they go on.
#[derive(Clone, Debug, Default)]
pub struct CycleCounter {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
}

impl CycleCounter {
    /// Whether the task begins another cycle.
    pub fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Counts a cycle.
    pub fn one_more(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Cycles per second of so many tasks together.
///
/// # Panics
/// If a task panics.
pub async fn measure<F: Future<Output = ()> + Send + 'static>(
    tasks: u64,
    work: impl Fn(u64, CycleCounter) -> F,
) -> f64 {
    let counter = CycleCounter::default();
    let tasks: Vec<_> = (0..tasks).map(|task| tokio::spawn(work(task, counter.clone()))).collect();
    tokio::time::sleep(ROUND / 5).await;
    let (began, before) = (Instant::now(), counter.count.load(Ordering::Relaxed));
    tokio::time::sleep(ROUND).await;
    let rate = (counter.count.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64();
    counter.stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("the task ends well");
    }
    rate
}

/// Acquires and releases a lock of its own, over and over.
///
/// # Panics
/// If the lock is not granted.
pub async fn acquire_and_release(store: Arc<dyn Store>, task: u64, counter: CycleCounter) {
    let name = LockName::new(format!("task/{task}")).expect("a name");
    let holder = Arc::new(Holder::new("bench", 1, None).expect("a holder"));
    while counter.goes_on() {
        let attempt = Attempt::from_bytes(random_128());
        let request = LockRequest::new(attempt, name.clone(), Duration::from_secs(30), holder.clone());
        let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request).await else { panic!("not granted") };
        store.release(&grant.key).await.expect("an answer");
        counter.one_more();
    }
}

/// One comparison: the medians, and the median of the ratios of neighbouring measurements.
#[derive(Debug)]
pub struct Comparison {
    what: String,
    peer: Vec<f64>,
    ours: Vec<f64>,
}

impl Comparison {
    /// A comparison without a measurement.
    pub fn new(what: impl Into<String>) -> Comparison {
        Comparison { what: what.into(), peer: Vec::new(), ours: Vec::new() }
    }

    /// Adds two neighbouring measurements.
    pub fn add(&mut self, peer: f64, ours: f64) {
        self.peer.push(peer);
        self.ours.push(ours);
    }

    /// Prints the medians and the ratio.
    ///
    /// # Panics
    /// Without a measurement.
    pub fn print(&self, goal: &str) {
        let ratio = median(self.ours.iter().zip(&self.peer).map(|(ours, peer)| ours / peer).collect());
        let (peer, ours) = (median(self.peer.clone()), median(self.ours.clone()));
        println!("{}: {peer:.0}/s, ours {ours:.0}/s, ratio {ratio:.2} ({goal})", self.what);
    }
}

fn median(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list[list.len() / 2]
}
