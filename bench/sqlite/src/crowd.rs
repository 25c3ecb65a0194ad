//! Measures how much many waiters delay a request for a free lock in the same process.

use std::path::Path;
use std::time::{Duration, Instant};

use lockkeeper_core::{LockName, LockRequest, Locks, Wait};

use crate::{bare, ours};

const GOAL: Duration = Duration::from_millis(50);

pub fn run(dir: &Path, waiters: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(crowd(dir, waiters));
}

async fn crowd(dir: &Path, waiters: usize) {
    let (store, other) = (ours::open(&dir.join("crowd.db")), ours::open(&dir.join("crowd.db")));
    let (hot, free) = (LockName::new("hot").expect("a name"), LockName::new("free").expect("a name"));
    let holder = ours::holder();
    let held = ours::take(&other, &hot, &holder).await;
    let began = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..waiters {
        let store = store.clone();
        let request = LockRequest { wait: Wait::Forever, ..ours::request(&hot, &holder) };
        tasks.push(tokio::spawn(async move {
            let answer = store.acquire(&request).await.expect("it is served");
            store.release(&request.key).await.expect("an answer");
            answer
        }));
    }
    let sql = bare::open(&dir.join("bare.db"));
    let coming = worst(&store, &sql, &free, || async {
        let view = other.inspect(&hot).await.expect("an answer");
        view.is_some_and(|view| view.waiting == waiters)
    });
    let coming = coming.await;
    let stood = began.elapsed();
    let until = Instant::now() + Duration::from_secs(3);
    let standing = worst(&store, &sql, &free, || async move { Instant::now() > until }).await;
    let began = Instant::now();
    other.release(&held.key).await.expect("an answer");
    let last = tasks.pop().expect("one of them");
    let served = worst(&store, &sql, &free, || async { last.is_finished() }).await;
    for task in tasks.into_iter().chain([last]) {
        task.await.expect("the task ends well");
    }
    let show = |[ours, bare]: [Duration; 2]| format!("at most {ours:.1?} (a bare INSERT: {bare:.1?})");
    println!("a free lock, while {waiters} others of the process come ({stood:.1?}): {}", show(coming));
    println!("  while they wait: {}", show(standing));
    println!(
        "  while they are served ({:.1?}): {} (goal for all: at most {GOAL:?})",
        began.elapsed(),
        show(served)
    );
}

/// The longest that a free lock was waited for, until `done`, and the longest that a bare pair took on the same disk in the same time.
async fn worst<F: Future<Output = bool>>(
    store: &lockkeeper_sqlite::SqliteStore,
    sql: &rusqlite::Connection,
    free: &LockName,
    done: impl Fn() -> F,
) -> [Duration; 2] {
    let holder = ours::holder();
    let mut worst = [Duration::ZERO; 2];
    loop {
        let began = Instant::now();
        let grant = ours::take(store, free, &holder).await;
        worst[0] = worst[0].max(began.elapsed());
        store.release(&grant.key).await.expect("an answer");
        let began = Instant::now();
        bare::take(sql, "free", 1);
        worst[1] = worst[1].max(began.elapsed());
        bare::give(sql, "free", 1);
        if done().await {
            return worst;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
