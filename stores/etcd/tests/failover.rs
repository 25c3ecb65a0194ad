//! Members that die or hang under load: a counter loses nothing, fences grow, and no client must be restarted.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::try_open;
use lockkeeper_core::{Error, RenewOutcome, Store};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, join_queue, request, set_patience, take, with,
};
use lockkeeper_testkit::scenarios::failover;
use lockkeeper_testkit::servers::{self, Cluster, EtcdOptions};

/// With the default timeout for a silent member, which is the subject of these tests.
async fn open(cluster: &Cluster) -> Arc<dyn Store> {
    try_open(&format!("etcd://{}", cluster.hosts())).await.expect("it opens")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_killed() {
    let Ok(cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    failover::contend(cluster, open, failover::kill_leaders).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_paused() {
    let Ok(cluster) = servers::etcd_cluster(3, EtcdOptions::default()) else { return };
    failover::contend(cluster, open, failover::pause_leader).await;
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
    let cluster = failover::blocking(cluster, failover::restart_two).await;
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
    // etcd hashes a password for seconds beside a dozen builds: at the lowest cost, and no time-out of a call is short.
    set_patience(Duration::from_secs(120));
    let extra = vec!["--bcrypt-cost=4".to_owned()];
    let Ok(mut server) = servers::etcd(EtcdOptions { extra, ..EtcdOptions::default() }) else { return };
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
    denied(format!("etcd://{addr}/jobs?timeout=30s")).await;
    denied(format!("etcd://app:wrong@{addr}/jobs?timeout=30s")).await;
    denied(format!("etcd://app:pass@{addr}/other?timeout=30s")).await;
    let store: Arc<dyn Store> = try_open(&format!("etcd://app:pass@{addr}/jobs?timeout=30s")).await.unwrap();
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
    let findings = store.profile().findings;
    assert!(
        findings.iter().any(|finding| finding.text.contains("leader")),
        "it is not declared: {findings:?}"
    );
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
