//! Members that die and members that hang, in the middle of it: a counter loses nothing, fences grow, and nobody has to
//! restart a client.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::{Counter, keeper, try_open};
use lockkeeper_core::{Error, Renewal, Store};
use lockkeeper_testkit::laws::{ask, eventually, give_back, granted, soon, stand_in_line, take, with};
use lockkeeper_testkit::servers::{self, Cluster, EtcdOptions, TempDir};

/// With the patience for a silent member that it has by default: that is what these tests are about.
async fn open(cluster: &Cluster) -> Arc<dyn Store> {
    try_open(&format!("etcd://{}", cluster.hosts())).await.expect("it opens")
}

/// Contends from several clients while `faults` happen to the cluster, then checks what came of it.
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
    assert_eq!(counter.get(), sum.load(Ordering::SeqCst), "two were in at once");
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
    let held = take(&store, &ask("x")).await;
    cluster.node_mut(0).kill9();
    cluster.node_mut(1).kill9();
    let refused = store.acquire(&ask("y")).await;
    assert!(matches!(refused, Err(Error::Unknown(_) | Error::Unavailable(_))), "{refused:?}");
    let cluster = tokio::task::spawn_blocking(move || {
        // The first cannot answer before the second is there.
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
        let again = with(ask("z"), |_| {});
        matches!(store.acquire(&again).await, Ok(lockkeeper_core::Acquired::Granted(_)))
    })
    .await;
    eventually("it is still held", || async {
        // Those that have come back may not have found each other for good yet.
        store.renew(std::slice::from_ref(&held)).await.is_ok_and(|renewed| renewed == [Renewal::Renewed])
    })
    .await;
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn away_wrong_password_and_missing_rights_are_told_apart() {
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
    let held = take(&store, &ask("x")).await;
    // A restart forgets who had logged in, and nobody notices.
    tokio::task::block_in_place(|| server.restart());
    eventually("it is renewed after a restart", || async {
        store.renew(std::slice::from_ref(&held)).await.is_ok_and(|renewed| renewed == [Renewal::Renewed])
    })
    .await;
    give_back(&store, &held.claim).await;
    server.kill9();
    let away = store.acquire(&ask("x")).await;
    assert!(matches!(away, Err(Error::Unavailable(_) | Error::Unknown(_))), "{away:?}");
    let away = try_open(&format!("etcd://{addr}")).await;
    assert!(matches!(away.err(), Some(Error::Unavailable(_))));
}

/// A member that has lost the others does not know what became of a grant meanwhile, so it cannot renew it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_without_a_majority_renews_nothing() {
    let Ok(cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    let leader = tokio::task::block_in_place(|| cluster.leader());
    let alone = (leader + 1) % 3;
    let store = try_open(&format!("etcd://{}", cluster.nodes()[alone].addr())).await.unwrap();
    // The lease lasts for ten seconds more than the grant needs: no keep-alive is needed for the next renewal.
    let held = take(&store, &with(ask("x"), |ask| ask.ttl = Duration::from_secs(80))).await;
    let others = || cluster.nodes().iter().enumerate().filter(|(nth, _)| *nth != alone).map(|(_, node)| node);
    others().for_each(|node| node.pause());
    let renewed = store.renew(std::slice::from_ref(&held)).await;
    others().for_each(|node| node.resume());
    assert!(!matches!(&renewed, Ok(renewed) if renewed[0] == Renewal::Renewed), "{renewed:?}");
    eventually("it is renewed by a majority", || async {
        store.renew(std::slice::from_ref(&held)).await.is_ok_and(|renewed| renewed == [Renewal::Renewed])
    })
    .await;
}

/// A new leader gives every lease its whole time again. That is declared, and the lock of a dead holder is free that long after the last
/// change of leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_holder_costs_a_lease_after_the_last_leader() {
    let Ok(mut cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    let (store, dies) = (open(&cluster).await, open(&cluster).await);
    let notes = store.profile().notes;
    assert!(notes.iter().any(|note| note.contains("leader")), "it is not declared: {notes:?}");
    let ttl = Duration::from_secs(8);
    let held = take(&dies, &with(ask("x"), |ask| ask.ttl = ttl)).await;
    let waiter = stand_in_line(&store, &ask("x"), 1).await;
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
