//! Members of a cluster die or hang under load: a counter loses nothing, fences grow, and no client has to be restarted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_core::{Error, Store};
use lockkeeper_host::SystemClock;

use crate::laws::{eventually, soon};
use crate::resource::CounterFile;
use crate::servers::{Cluster, TempDir};

/// Contends from four clients while `faults` happen to the cluster, then checks the counter and the fences. `open` opens a client.
///
/// # Panics
/// If two clients hold the lock at once, a fence goes back, a guard is lost, or the clients stop working.
pub async fn contend(
    cluster: Cluster,
    open: impl AsyncFn(&Cluster) -> Arc<dyn Store>,
    faults: impl FnOnce(&mut Cluster) + Send + 'static,
) {
    let dir = TempDir::new("failover");
    let counter = CounterFile::new(dir.join("counter"));
    let (stop, sum, last) =
        (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let keeper = Lockkeeper::with_store(open(&cluster).await, Arc::new(SystemClock));
        let (counter, stop, sum, last) = (counter.clone(), stop.clone(), sum.clone(), last.clone());
        workers.push(tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let guard = match keeper.lock("popular").ttl(Duration::from_secs(15)).acquire().await {
                    Ok(guard) => guard,
                    Err(Error::Unknown(_) | Error::Unavailable(_)) => continue,
                    Err(error) => panic!("{error}"),
                };
                counter.increment_slowly().await.expect("a counter");
                sum.fetch_add(1, Ordering::SeqCst);
                let before = last.fetch_max(guard.fence().get(), Ordering::SeqCst);
                assert!(before < guard.fence().get(), "the fence went back");
                assert!(guard.is_held(), "lost while it was held for milliseconds");
                _ = guard.release().await;
            }
            keeper.settle().await;
        }));
    }
    let working = |from: u64| {
        let sum = sum.clone();
        async move {
            eventually("the work goes on", || async { sum.load(Ordering::SeqCst) > from + 20 }).await;
        }
    };
    working(0).await;
    let cluster = blocking(cluster, faults).await;
    working(sum.load(Ordering::SeqCst)).await;
    stop.store(true, Ordering::SeqCst);
    for worker in workers {
        soon("a worker ends", worker).await.expect("a worker ends well");
    }
    let counted = counter.get().expect("a counter");
    assert_eq!(counted, sum.load(Ordering::SeqCst), "two clients held the lock at once");
    drop(cluster);
}

/// Changes the cluster on a thread that may block.
///
/// # Panics
/// If `change` panics.
pub async fn blocking(mut cluster: Cluster, change: impl FnOnce(&mut Cluster) + Send + 'static) -> Cluster {
    let changing = tokio::task::spawn_blocking(move || {
        change(&mut cluster);
        cluster
    });
    changing.await.expect("the members change")
}

/// Kills the leader, and its successor.
pub fn kill_leaders(cluster: &mut Cluster) {
    for _ in 0..2 {
        let leader = cluster.leader();
        cluster.node_mut(leader).kill9();
        std::thread::sleep(Duration::from_secs(2));
        cluster.node_mut(leader).restart();
    }
}

/// Stops the leader for as long as the others need to elect another one.
pub fn pause_leader(cluster: &mut Cluster) {
    let leader = cluster.leader();
    cluster.node_mut(leader).pause();
    std::thread::sleep(Duration::from_secs(8));
    cluster.node_mut(leader).resume();
}

/// Restarts the first two members together: the first cannot serve before the second one runs.
///
/// # Panics
/// If the cluster has fewer.
pub fn restart_two(cluster: &mut Cluster) {
    let [first, second, ..] = cluster.nodes_mut() else { panic!("two members") };
    std::thread::scope(|scope| {
        scope.spawn(|| first.restart());
        scope.spawn(|| second.restart());
    });
}
