//! Members that die or hang under load: a counter loses nothing, fences grow, and no client must be restarted.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::{Counter, keeper, try_open};
use lockkeeper_core::{Error, RenewOutcome, Store};
use lockkeeper_testkit::laws::{eventually, give_back, granted, join_queue, request, soon, take, with};
use lockkeeper_testkit::servers::{self, Cluster, EtcdOptions, TempDir};

/// With the default timeout for a silent member, which is the subject of these tests.
async fn open(cluster: &Cluster) -> Arc<dyn Store> {
    try_open(&format!("etcd://{}", cluster.hosts())).await.expect("it opens")
}

/// Contends from several clients while `faults` run on the cluster, then checks the counter and the fences.
async fn contend(mut cluster: Cluster, faults: impl FnOnce(&mut Cluster) + Send + 'static) {
    let dir = TempDir::new("failover");
    let counter = Arc::new(Counter::new(dir.path()));
    let (stop, sum, last) =
        (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let keeper = keeper(&open(&cluster).await);
        let (counter, stop, sum, last) = (counter.clone(), stop.clone(), sum.clone(), last.clone());
        workers.push(tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                let guard = match keeper.lock("popular").ttl(Duration::from_secs(15)).acquire().await {
                    Ok(guard) => guard,
                    Err(Error::Unknown(_) | Error::Unavailable(_)) => continue,
                    Err(error) => panic!("{error}"),
                };
                counter.add_one().await;
                sum.fetch_add(1, Ordering::SeqCst);
                let before = last.fetch_max(guard.fence().get(), Ordering::SeqCst);
                assert!(before < guard.fence().get(), "the fence went back");
                assert!(guard.is_held(), "lost while it was held for milliseconds");
                _ = guard.release().await;
            }
            keeper.settle().await;
        }));
    }
    let working = |sum: &Arc<AtomicU64>| {
        let (sum, from) = (sum.clone(), sum.load(Ordering::SeqCst));
        async move {
            eventually("the work goes on", || async { sum.load(Ordering::SeqCst) > from + 20 }).await;
        }
    };
    working(&sum).await;
    let cluster = tokio::task::spawn_blocking(move || {
        faults(&mut cluster);
        cluster
    })
    .await
    .unwrap();
    working(&sum).await;
    stop.store(true, Ordering::SeqCst);
    for worker in workers {
        soon("a worker ends", worker).await.unwrap();
    }
    assert_eq!(counter.get(), sum.load(Ordering::SeqCst), "two clients held the lock at once");
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_killed() {
    let Ok(cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    contend(cluster, |cluster| {
        for _ in 0..2 {
            let leader = cluster.leader();
            cluster.node_mut(leader).kill9();
            std::thread::sleep(Duration::from_secs(2));
            cluster.node_mut(leader).restart();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_paused() {
    let Ok(cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    contend(cluster, |cluster| {
        let leader = cluster.leader();
        cluster.node_mut(leader).pause();
        std::thread::sleep(Duration::from_secs(8));
        cluster.node_mut(leader).resume();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_granted_and_it_comes_back() {
    let Ok(mut cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    let store = open(&cluster).await;
    let held = take(&store, &request("x")).await;
    cluster.node_mut(0).kill9();
    cluster.node_mut(1).kill9();
    let refused = store.acquire(&request("y")).await;
    assert!(matches!(refused, Err(Error::Unknown(_) | Error::Unavailable(_))), "{refused:?}");
    let cluster = tokio::task::spawn_blocking(move || {
        // The first member cannot serve before the second is up.
        std::thread::scope(|scope| {
            let mut nodes = cluster.nodes_mut().iter_mut();
            let (first, second) = (nodes.next().unwrap(), nodes.next().unwrap());
            scope.spawn(|| first.restart());
            scope.spawn(|| second.restart());
        });
        cluster
    })
    .await
    .unwrap();
    eventually("it comes back by itself", || async {
        let again = with(request("z"), |_| {});
        matches!(store.acquire(&again).await, Ok(lockkeeper_core::AcquireOutcome::Granted(_)))
    })
    .await;
    eventually("it is still held", || async {
        // The restarted members may not have elected a stable leader yet.
        store.renew(std::slice::from_ref(&held)).await.is_ok_and(|renewed| renewed == [RenewOutcome::Renewed])
    })
    .await;
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_wrong_password_and_missing_permission_differ() {
    let Ok(mut server) = servers::etcd(EtcdOptions::default()) else { return };
    let addr = server.addr();
    let ctl = |args: &[&str]| _ = common::ctl(addr, args);
    ctl(&["user", "add", "root:secret"]);
    ctl(&["user", "grant-role", "root", "root"]);
    ctl(&["user", "add", "app:pass"]);
    ctl(&["role", "add", "jobs"]);
    ctl(&["role", "grant-permission", "jobs", "readwrite", "--prefix=true", "jobs/"]);
    ctl(&["user", "grant-role", "app", "jobs"]);
    ctl(&["auth", "enable"]);
    let denied = |url: String| async move {
        let error = try_open(&url).await.err().expect("not allowed");
        assert!(matches!(error, Error::Denied(_)), "{url}: {error:?}");
        assert!(!error.to_string().contains("wrong"), "a password is shown: {error}");
    };
    denied(format!("etcd://{addr}/jobs")).await;
    denied(format!("etcd://app:wrong@{addr}/jobs")).await;
    denied(format!("etcd://app:pass@{addr}/other")).await;
    let store: Arc<dyn Store> = try_open(&format!("etcd://app:pass@{addr}/jobs?timeout=1s")).await.unwrap();
    let held = take(&store, &request("x")).await;
    // The restarted server does not know the login token, and the store logs in again.
    tokio::task::block_in_place(|| server.restart());
    eventually("it is renewed after a restart", || async {
        store.renew(std::slice::from_ref(&held)).await.is_ok_and(|renewed| renewed == [RenewOutcome::Renewed])
    })
    .await;
    give_back(&store, &held.key).await;
    server.kill9();
    let away = store.acquire(&request("x")).await;
    assert!(matches!(away, Err(Error::Unavailable(_) | Error::Unknown(_))), "{away:?}");
    let away = try_open(&format!("etcd://{addr}")).await;
    assert!(matches!(away.err(), Some(Error::Unavailable(_))));
}

/// A member without the others cannot know what became of a grant, so it must not renew it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_without_a_majority_renews_nothing() {
    let Ok(cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    let leader = tokio::task::block_in_place(|| cluster.leader());
    let alone = (leader + 1) % 3;
    let store = try_open(&format!("etcd://{}", cluster.nodes()[alone].addr())).await.unwrap();
    // The lease lasts for ten seconds more than the grant needs: the next renewal needs no keep-alive.
    let held = take(&store, &with(request("x"), |request| request.ttl = Duration::from_secs(80))).await;
    let others = || cluster.nodes().iter().enumerate().filter(|(nth, _)| *nth != alone).map(|(_, node)| node);
    others().for_each(|node| node.pause());
    let renewed = store.renew(std::slice::from_ref(&held)).await;
    others().for_each(|node| node.resume());
    assert!(!matches!(&renewed, Ok(renewed) if renewed[0] == RenewOutcome::Renewed), "{renewed:?}");
    eventually("it is renewed by a majority", || async {
        store.renew(std::slice::from_ref(&held)).await.is_ok_and(|renewed| renewed == [RenewOutcome::Renewed])
    })
    .await;
}

/// A new leader restarts every lease with its full ttl. The profile declares that, and the lock of a dead holder is
/// free that long after the last change of leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_holder_costs_a_lease_after_the_last_leader() {
    let Ok(mut cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    let (store, dies) = (open(&cluster).await, open(&cluster).await);
    let notes = store.profile().notes;
    assert!(notes.iter().any(|note| note.contains("leader")), "it is not declared: {notes:?}");
    let ttl = Duration::from_secs(8);
    let held = take(&dies, &with(request("x"), |request| request.ttl = ttl)).await;
    let waiter = join_queue(&store, &request("x"), 1).await;
    drop(dies);
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_secs(4)).await;
        tokio::task::block_in_place(|| {
            let leader = cluster.leader();
            cluster.node_mut(leader).kill9();
            cluster.leader();
            cluster.node_mut(leader).restart();
            cluster.settle();
        });
    }
    let changed = std::time::Instant::now();
    let next = granted(waiter).await;
    let (took, wake) = (changed.elapsed(), store.profile().wake);
    assert!(next.fence > held.fence);
    let declared = ttl + ttl / 8 + wake;
    assert!(took <= declared, "free {took:?} after the last change of leader: {declared:?} are declared");
}
