//! Measures how slow the machine is while a test of recipes runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lockkeeper::Lockkeeper;

/// A task that takes uncontended locks, one after the other: how long that takes is how slow the machine is just now,
/// or for how long the store is unreachable. No promise is quicker than that.
pub struct Control {
    seen: Arc<Mutex<Seen>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Seen {
    longest: Duration,
    under_way: Option<Instant>,
}

impl Seen {
    fn longest(&self) -> Duration {
        self.longest.max(self.under_way.map_or(Duration::ZERO, |began| began.elapsed()))
    }

    fn ends(&mut self) {
        (self.longest, self.under_way) = (self.longest(), None);
    }
}

impl Control {
    /// In a thread of its own: the test blocks its own.
    pub fn start(store: &str) -> Control {
        let (seen, ends) = (Arc::<Mutex<Seen>>::default(), Arc::<AtomicBool>::default());
        let (url, its_seen, its_ends) = (store.to_owned(), seen.clone(), ends.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let keeper = Lockkeeper::open(&url).await.unwrap();
                while !its_ends.load(Ordering::Relaxed) {
                    its_seen.lock().unwrap().under_way = Some(Instant::now());
                    while !once(&keeper).await && !its_ends.load(Ordering::Relaxed) {}
                    its_seen.lock().unwrap().ends();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            });
        });
        Control { seen, ends, thread: Some(thread) }
    }

    /// From here on.
    pub fn reset(&self) {
        let mut seen = self.seen.lock().unwrap();
        *seen = Seen { longest: Duration::ZERO, under_way: seen.under_way.map(|_| Instant::now()) };
    }

    /// The longest that it took since [`Control::reset`].
    pub fn longest(&self) -> Duration {
        self.seen.lock().unwrap().longest()
    }
}

async fn once(keeper: &Lockkeeper) -> bool {
    // Each time another: one that could not be given back is not to be waited for.
    let name = format!("control/{:?}", Lockkeeper::new_attempt());
    match keeper.lock(name).ttl(Duration::from_secs(1)).acquire().await {
        Ok(guard) => guard.release().await.is_ok(),
        Err(_) => {
            tokio::time::sleep(Duration::from_millis(10)).await;
            false
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
