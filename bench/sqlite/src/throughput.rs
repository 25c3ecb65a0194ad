//! Acquires and releases free locks in one process, one task or many at once, each with names of its own.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockkeeper_core::LockName;

use crate::{bare, median, ours, ratio};

const ROUND: Duration = Duration::from_millis(500);

pub fn run(dir: &Path, tasks: usize, goal: f64, rounds: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let sql = Arc::new(Mutex::new(bare::open(&dir.join("bare.db"))));
    let store = ours::open(&dir.join("ours.db"));
    let (mut by_hand, mut fenced) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        by_hand.push(runtime.block_on(measure(tasks, |task, stop, done| {
            let sql = sql.clone();
            async move {
                let (name, mut turn) = (format!("task/{task}"), 0);
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    bare::cycle(&sql.lock().expect("no panic"), &name, turn);
                    done.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                }
            }
        })));
        fenced.push(runtime.block_on(measure(tasks, |task, stop, done| {
            let store = store.clone();
            async move {
                let name = LockName::new(format!("task/{task}")).expect("a name");
                let holder = ours::holder();
                while !stop.load(Ordering::Relaxed) {
                    ours::cycle(&store, &name, &holder).await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
        })));
    }
    let ratio = ratio(&fenced, &by_hand);
    println!(
        "acquire+release, {tasks} tasks: bare INSERT and DELETE {:.0}/s, fenced {:.0}/s: ratio {ratio:.2} (goal: at least {goal})",
        median(by_hand),
        median(fenced)
    );
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
