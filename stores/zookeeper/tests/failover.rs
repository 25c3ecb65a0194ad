//! Servers die and hang under load: a counter loses nothing, fences grow, and no client has to be restarted.

mod common;

use std::time::Duration;

use common::{keeper, open, try_open};
use lockkeeper_core::{AcquireOutcome, Error, Expect, RenewOutcome};
use lockkeeper_testkit::laws::{self, eventually, give_back, request, soon, take, with};
use lockkeeper_testkit::proxy::{Direction, Framing, Pick, Proxy};
use lockkeeper_testkit::scenarios::failover;
use lockkeeper_testkit::servers::{self, Cluster, ZooKeeperOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_killed() {
    let Ok(cluster) = servers::zookeeper_cluster(3, ZooKeeperOptions::default()) else { return };
    failover::contend(cluster, async |cluster: &Cluster| open(cluster.hosts()).await, failover::kill_leaders)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_paused() {
    let Ok(cluster) = servers::zookeeper_cluster(3, ZooKeeperOptions::default()) else { return };
    failover::contend(cluster, async |cluster: &Cluster| open(cluster.hosts()).await, failover::pause_leader)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_granted_and_it_comes_back() {
    let Ok(mut cluster) = servers::zookeeper_cluster(3, ZooKeeperOptions::default()) else { return };
    let store = open(cluster.hosts()).await;
    let held = take(&store, &with(request("x"), |request| request.ttl = Duration::from_secs(2))).await;
    cluster.node_mut(0).kill9();
    cluster.node_mut(1).kill9();
    let refused = store.acquire(&request("y")).await;
    assert!(matches!(refused, Err(Error::Unknown(_) | Error::Unavailable(_))), "{refused:?}");
    let cluster = failover::blocking(cluster, failover::restart_two).await;
    eventually("it comes back by itself", || async {
        let again = with(request("z"), |_| {});
        matches!(store.acquire(&again).await, Ok(AcquireOutcome::Granted(_)))
    })
    .await;
    // Renewed, or lost with its session: the fence grows in both cases.
    let renewed = store.renew(std::slice::from_ref(&held)).await.unwrap();
    if renewed == [RenewOutcome::Lost] {
        eventually("it may be had again", || async {
            match store.acquire(&request("x")).await {
                Ok(AcquireOutcome::Granted(next)) => {
                    assert!(next.fence > held.fence);
                    true
                }
                _ => false,
            }
        })
        .await;
    }
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_cut_off_from_its_clients() {
    // The session must outlast the search for another server.
    let extra = vec!["maxSessionTimeout=60000".into()];
    let options = ZooKeeperOptions { extra, ..ZooKeeperOptions::default() };
    let Ok(cluster) = servers::zookeeper_cluster(3, options) else { return };
    // Each server is behind a proxy, and one proxy after the other is blocked.
    let proxies: Vec<Proxy> =
        cluster.nodes().iter().map(|node| Proxy::start(node.addr(), Framing::Bytes)).collect();
    let hosts = proxies.iter().map(|proxy| proxy.addr().to_string()).collect::<Vec<_>>().join(",");
    let store = try_open(&format!("zk://{hosts}?timeout=1s&session=20s")).await.unwrap();
    let (keeper, mut last) = (keeper(&store), None);
    for proxy in &proxies {
        // The server's replies are held, and the connection stays open.
        proxy.hold(Direction::Replies);
        let guard = soon("it goes on with another server", async {
            loop {
                match keeper.lock("x").ttl(Duration::from_secs(2)).acquire().await {
                    Ok(guard) => break guard,
                    Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        })
        .await;
        assert!(Some(guard.fence()) > last, "the fence went back");
        last = Some(guard.fence());
        drop(guard);
        soon("it is given back", keeper.settle()).await;
        proxy.cut(Pick::Any);
        proxy.heal();
    }
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_denied_and_missing_path_are_different_errors() {
    // The session must outlast a restart, also on a busy machine.
    let extra = vec!["maxSessionTimeout=60000".into()];
    let options = ZooKeeperOptions { extra, ..ZooKeeperOptions::default() };
    let Ok(mut server) = servers::zookeeper(options) else { return };
    let addr = server.addr();
    let url = format!("zk://app:pass@{addr}/jobs?create=yes&timeout=1s&session=60s");
    let store = try_open(&url).await.unwrap();
    let held = take(&store, &request("x")).await;
    for denied in ["", "app:wrong@", "other:pass@"] {
        let url = format!("zk://{denied}{addr}/jobs");
        let error = try_open(&url).await.err().expect("not allowed");
        assert!(matches!(error, Error::Denied(_)), "{url}: {error:?}");
        assert!(!error.to_string().contains("wrong"), "a password is shown: {error}");
    }
    let error = try_open(&format!("zk://{addr}/jbos")).await.err().expect("mistyped");
    assert!(matches!(&error, Error::Invalid(text) if text.contains("/jbos")), "{error:?}");
    // A restart, which the holder survives.
    tokio::task::block_in_place(|| server.restart());
    eventually("it is renewed after a restart", || async {
        match store.renew(std::slice::from_ref(&held)).await {
            Ok(renewed) => {
                assert_eq!(renewed, [RenewOutcome::Renewed]);
                true
            }
            Err(_) => false,
        }
    })
    .await;
    give_back(&store, &held.key).await;
    server.kill9();
    let away = store.acquire(&request("x")).await;
    assert!(matches!(away, Err(Error::Unavailable(_) | Error::Unknown(_))), "{away:?}");
    let away = try_open(&format!("zk://{addr}")).await;
    assert!(matches!(away.err(), Some(Error::Unavailable(_))));
}

/// A follower may be behind the leader: it does not know a grant or a record that a majority has accepted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_is_behind_misses_no_holder() {
    let Ok(mut cluster) = servers::zookeeper_cluster(3, ZooKeeperOptions::default()) else { return };
    let leader = cluster.leader();
    let behind = (0..3).find(|node| *node != leader).unwrap();
    let [ahead, late] = [leader, behind].map(|node| open(cluster.nodes()[node].addr()));
    let (ahead, late) = (ahead.await, late.await);
    for round in 0..48u8 {
        let (name, key) = (laws::name("x"), laws::name(&format!("record/{round}")));
        cluster.node_mut(behind).pause();
        let held = take(&ahead, &request("x")).await;
        ahead.write(&key, &[round], Expect::Absent, None).await.unwrap();
        let requests = late.clone();
        // Only one of the two in each round, because either makes the server catch up.
        let asked = tokio::spawn(async move {
            match round % 4 {
                0 => requests.break_lock(&name, "a test").await.map(|fence| assert!(fence > held.fence)),
                _ => requests
                    .read(&key)
                    .await
                    .map(|record| assert!(record.is_some(), "a record was overlooked")),
            }
        });
        // Time for the request to be sent before the server resumes. There is no event to wait for.
        tokio::time::sleep(Duration::from_millis(20)).await;
        cluster.node_mut(behind).resume();
        soon("an answer", asked).await.unwrap_or_else(|_| panic!("round {round}")).unwrap();
        let broken = ahead.renew(std::slice::from_ref(&held)).await.unwrap() == [RenewOutcome::Lost];
        assert_eq!(broken, round % 4 == 0, "round {round}: whether the holder was broken");
        give_back(&ahead, &held.key).await;
    }
}
