//! Measures a store beside a peer in the same run: the benchmarks publish ratios only.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::{AcquireOutcome, Attempt, Holder, LockName, LockRequest, Store, Wait};
use lockkeeper_host::random_128;

/// How long one measurement lasts.
const ROUND: Duration = Duration::from_millis(700);

/// How many rounds the command line asks for, as its first argument.
///
/// # Panics
/// If the first argument is not a number.
pub fn rounds(default: usize) -> usize {
    std::env::args().nth(1).map_or(default, |text| text.parse().expect("ROUNDS is a number"))
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

/// The median time from the release of a lock by one client to its grant at another one that waits for it.
///
/// # Panics
/// If a request is not granted.
pub async fn hand_off(here: &dyn Store, there: &Arc<dyn Store>, times: usize) -> Duration {
    let holder = Arc::new(Holder::new("bench", 1, None).expect("a holder"));
    let name = LockName::new("hand-off").expect("a name");
    let request = |wait| {
        let attempt = Attempt::from_bytes(random_128());
        LockRequest {
            wait,
            ..LockRequest::new(attempt, name.clone(), Duration::from_secs(30), holder.clone())
        }
    };
    let mut times_taken = Vec::new();
    for _ in 0..times {
        let Ok(AcquireOutcome::Granted(held)) = here.acquire(&request(Wait::No)).await else {
            panic!("busy")
        };
        let (there2, next) = (there.clone(), request(Wait::Forever));
        let waiter = tokio::spawn(async move {
            let granted = there2.acquire(&next).await;
            (Instant::now(), granted)
        });
        while here.inspect(&name).await.expect("an answer").is_none_or(|view| view.waiting == 0) {}
        let began = Instant::now();
        here.release(&held.key).await.expect("an answer");
        let (when, granted) = waiter.await.expect("it ends well");
        let Ok(AcquireOutcome::Granted(next)) = granted else { panic!("not granted") };
        times_taken.push(when - began);
        there.release(&next.key).await.expect("an answer");
    }
    median(times_taken)
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
        let ratio = median_ratio(&self.ours, &self.peer);
        let (peer, ours) = (median(self.peer.clone()), median(self.ours.clone()));
        println!("{}: {peer:.0}/s, ours {ours:.0}/s, ratio {ratio:.2} ({goal})", self.what);
    }
}

/// The median of the ratios of neighbouring measurements, because a busy machine slows down both of them.
///
/// # Panics
/// Without a measurement.
pub fn median_ratio(ours: &[f64], peer: &[f64]) -> f64 {
    median(ours.iter().zip(peer).map(|(ours, peer)| ours / peer).collect())
}

/// The value in the middle.
///
/// # Panics
/// Without a value, or with one that compares with none.
pub fn median<T: Copy + PartialOrd>(mut list: Vec<T>) -> T {
    list.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
    list[list.len() / 2]
}
