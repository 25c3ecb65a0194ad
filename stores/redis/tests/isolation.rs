//! One node of a cluster is silent or gone. The locks, requests and waiters of the other nodes are not harmed by it.

mod common;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use common::{Client, keeper, open, tell};
use futures_util::StreamExt;
use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Error, Event, EventKind, Finding, RenewOutcome};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, request, soon, take,
};
use lockkeeper_testkit::servers::{self, RedisCluster, RedisOptions};

/// A cluster whose nodes go on while one of them is missing.
fn cluster() -> Option<RedisCluster> {
    let extra = vec![("cluster-require-full-coverage".to_owned(), "no".to_owned())];
    servers::redis_cluster_with(3, RedisOptions { extra, ..RedisOptions::default() }).ok()
}

/// `count` names whose locks are at the node of this number.
fn names_at(cluster: &RedisCluster, node: usize, count: usize) -> Vec<String> {
    let names = (0..).map(|i| format!("orders/{i}"));
    let here = |text: &String| cluster.node_of_slot(cluster.slot_of(&format!("lock:{text}"))) == node;
    names.filter(here).take(count).collect()
}

async fn client_of(cluster: &RedisCluster) -> Client {
    open(&format!("redis+cluster://{}", cluster.addrs()[0])).await
}

/// One error of one group used to be the answer to all renewals of a process: 0 of 24 guards were held after one ttl.
#[tokio::test(flavor = "multi_thread")]
async fn guards_at_other_nodes_outlive_a_silent_node() {
    let Some(cluster) = cluster() else { return };
    let keeper = keeper(&client_of(&cluster).await);
    let ttl = Duration::from_secs(6);
    let mut guards = Vec::new();
    for node in 0..3 {
        for name in names_at(&cluster, node, 8) {
            guards.push((node, keeper.lock(&name).ttl(ttl).acquire().await.unwrap()));
        }
    }
    cluster.nodes()[2].pause();
    tokio::time::sleep(3 * ttl).await;
    let held = |node| guards.iter().filter(|(at, guard)| *at == node && guard.is_held()).count();
    assert_eq!([held(0), held(1)], [8, 8], "held at the nodes that answer");
    assert_eq!(held(2), 0, "held at the node that does not: their leases are over");
    cluster.nodes()[2].resume();
    for (node, guard) in guards {
        let released = guard.release().await;
        assert!(node == 2 || released.is_ok(), "{released:?}");
    }
    let store = client_of(&cluster).await;
    for node in 0..3 {
        for name in names_at(&cluster, node, 8) {
            eventually("it is free", || async {
                store.inspect(&lockkeeper_testkit::laws::name(&name)).await.is_ok_and(|v| v.is_none())
            })
            .await;
            is_free(&store, &name).await;
        }
    }
}

/// Renewals of many groups are answered one by one: what a silent node owes is unknown, and soon.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_at_a_silent_node_is_unknown_and_the_others_are_renewed() {
    let Some(cluster) = cluster() else { return };
    let store = open(&format!("redis+cluster://{}?timeout=60s", cluster.addrs()[0])).await;
    let ttl = Duration::from_secs(12);
    let mut grants = Vec::new();
    for node in 0..3 {
        let [text] = &names_at(&cluster, node, 1)[..] else { unreachable!() };
        grants.push(take(&store, &common::ask_for(text, ttl)).await);
    }
    cluster.nodes()[1].pause();
    let begun = Instant::now();
    let answers = soon("renewals are answered", store.renew(&grants)).await.unwrap();
    assert_eq!(answers, [RenewOutcome::Renewed, RenewOutcome::Unknown, RenewOutcome::Renewed]);
    assert!(begun.elapsed() < ttl * 3 / 4, "after {:?}", begun.elapsed());
    cluster.nodes()[1].resume();
}

/// While many requests wait for a silent node, the others answer as usual: requests, hand-offs, and the poll that finds a
/// lock that a foreign client gave back without a message.
#[tokio::test(flavor = "multi_thread")]
async fn other_nodes_serve_while_one_is_silent() {
    let Some(cluster) = cluster() else { return };
    let patient = async || open(&format!("redis+cluster://{}?timeout=10s", cluster.addrs()[0])).await;
    let (one, two) = (patient().await, patient().await);
    let healthy = names_at(&cluster, 0, 30);
    let silent = names_at(&cluster, 1, 30);
    // A waiter at each, so that both are polled.
    let held = take(&two, &request(&silent[0])).await;
    let waits = join_queue(&one, &request(&silent[0]), 1).await;
    tell(cluster.addrs()[0], &["SET", &format!("lock:{}", healthy[0]), "foreign", "PX", "600000"]);
    let foreign = join_queue(&one, &request(&healthy[0]), 1).await;
    cluster.nodes()[1].pause();
    let stuck: Vec<_> = silent[1..]
        .iter()
        .map(|text| {
            let (one, asked) = (one.clone(), request(text));
            tokio::spawn(async move { one.acquire(&asked).await.map(drop) })
        })
        .collect();
    let mut slowest = Duration::ZERO;
    for text in &healthy[1..] {
        let begun = Instant::now();
        let grant = take(&one, &request(text)).await;
        give_back(&one, &grant.key).await;
        slowest = slowest.max(begun.elapsed());
    }
    // The silent node may take `timeout` for each request.
    assert!(slowest < Duration::from_secs(5), "one took {slowest:?}");
    let begun = Instant::now();
    tell(cluster.addrs()[0], &["DEL", &format!("lock:{}", healthy[0])]);
    granted(foreign).await;
    assert!(begun.elapsed() < Duration::from_secs(6), "the poll took {:?}", begun.elapsed());
    for answer in join_all(stuck).await {
        let answer = answer.unwrap();
        assert!(matches!(answer, Err(Error::Unknown(_) | Error::Unavailable(_))), "{answer:?}");
    }
    cluster.nodes()[1].resume();
    eventually("the node answers again", || async { two.release(&held.key).await.is_ok() }).await;
    granted(waits).await;
}

/// A node that dies takes nothing along of what is known about the others: not one request to them fails or waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_costs_the_others_not_one_request() {
    let Some(mut cluster) = cluster() else { return };
    let store = open(&format!("redis+cluster://{}?timeout=10s", cluster.addrs()[0])).await;
    let (healthy, dead) = (names_at(&cluster, 0, 20), names_at(&cluster, 1, 20));
    take(&store, &request(&dead[0])).await;
    cluster.node_mut(1).kill9();
    for (here, there) in healthy.iter().zip(&dead) {
        let lost = soon("a request ends", store.acquire(&request(there))).await;
        assert!(matches!(lost, Err(Error::Unknown(_) | Error::Unavailable(_))), "{lost:?}");
        let begun = Instant::now();
        let answer = store.acquire(&request(here)).await;
        assert!(matches!(answer, Ok(AcquireOutcome::Granted(_))), "{answer:?}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

/// Seeds that accept connections and never reply delay no client for long: the client asks the next seed meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn seeds_that_are_silent_do_not_delay_the_opening() {
    let Some(cluster) = cluster() else { return };
    let silent: Vec<TcpListener> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let seeds: Vec<String> =
        silent.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
    let begun = Instant::now();
    let store =
        open(&format!("redis+cluster://{},{}?timeout=15s", seeds.join(","), cluster.addrs()[2])).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    take(&store, &request("orders/42")).await;
    assert!(store.inspect(&name("orders/42")).await.unwrap().is_some());
}

/// A watch reports what happens at the nodes that reply: one that dies, also the one that the client listens at, silences no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_goes_on_at_the_nodes_that_reply() {
    // Node 0 has the first slot.
    for dead in [1, 0] {
        let Some(mut cluster) = cluster() else { return };
        let text = names_at(&cluster, 2, 1).remove(0);
        let slot = cluster.slot_of(&format!("lock:{text}")).to_string();
        let store = client_of(&cluster).await;
        let before = store.watch("").await.unwrap();
        cluster.node_mut(dead).kill9();
        let after = soon("a watch opens", store.watch("")).await.unwrap();
        // The flags expire unless the client sets them again.
        let keys = tell(cluster.addrs()[2], &["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
        let flag = keys.lines().find(|key| key.ends_with(":watched")).expect("a flag").to_owned();
        let flagged = || tell(cluster.addrs()[2], &["EXISTS", &flag]) == "1";
        tell(cluster.addrs()[2], &["DEL", &flag]);
        eventually("the client sets its flag again", || async { flagged() }).await;
        // A watch may miss events while the client subscribes anew.
        let working = async {
            loop {
                give_back(&store, &take(&store, &request(&text)).await.key).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let reported = async {
            for mut watch in [before, after] {
                while !is_grant(soon("an event", watch.next()).await.expect("the watch goes on")) {}
            }
        };
        tokio::select! {
            () = working => {}
            () = reported => {}
        }
    }
}

fn is_grant(event: lockkeeper_core::Result<Event>) -> bool {
    matches!(event.unwrap().kind, EventKind::Granted { .. })
}

/// A release that a node did not answer is sent again for as long as the node is silent. That delays no release at another node.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_sent_again_though_another_node_is_silent() {
    let Some(cluster) = cluster() else { return };
    // A client without patience, and one whose calls to a silent node do not end in this test.
    let other = client_of(&cluster).await;
    let store =
        open(&format!("redis+cluster://{}?poll=50ms&claim=10m&timeout=10m", cluster.addrs()[0])).await;
    let (silent, healthy) = (names_at(&cluster, 2, 1).remove(0), names_at(&cluster, 1, 2));
    let held = take(&store, &request(&silent)).await;
    let mut queued = Vec::new();
    for text in &healthy {
        take(&other, &request(text)).await;
        let asked = request(text);
        queued.push((name(text), asked.key.clone(), join_queue(&store, &asked, 1).await));
    }
    cluster.nodes()[2].pause();
    let unanswered = tokio::time::timeout(Duration::from_millis(50), store.release(&held.key)).await;
    assert!(unanswered.is_err(), "{unanswered:?}");
    let refuse =
        |replicas: &str| tell(cluster.addrs()[1], &["CONFIG", "SET", "min-replicas-to-write", replicas]);
    for (name, key, waiter) in queued {
        // The server refuses the release, and the process goes on polling: only a release removes the queue entry.
        refuse("1");
        let refused = soon("a release ends", store.release(&key)).await;
        assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
        soon("the wait ends", waiter).await.unwrap().expect_err("it was released");
        refuse("0");
        eventually("the release is sent again", || async {
            other.inspect(&name).await.unwrap().unwrap().waiting == 0
        })
        .await;
    }
    cluster.nodes()[2].resume();
    eventually("the silent node has the release too", || async {
        store.inspect(&name(&silent)).await.is_ok_and(|view| view.is_none())
    })
    .await;
}

/// A node that has left the cluster is not called any more: the store closes its connections, also those that it keeps for grants
/// that wait for replicas.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_left_the_cluster_is_disconnected() {
    for option in ["", "?wait_replicas=1&timeout=300ms"] {
        leaves(option).await;
    }
}

async fn leaves(option: &str) {
    let Some(cluster) = cluster() else { return };
    let (addrs, text) = (cluster.addrs(), names_at(&cluster, 2, 1).remove(0));
    let store = open(&format!("redis+cluster://{}{option}", addrs[0])).await;
    // Without replicas the grants of a store that waits for them are given back.
    _ = soon("an answer", store.acquire(&request(&text))).await.map(drop);
    let connections = || {
        tell(addrs[2], &["CLIENT", "LIST", "TYPE", "PUBSUB"]).lines().count()
            + tell(addrs[2], &["CLIENT", "LIST", "TYPE", "NORMAL"]).lines().count()
    };
    assert!(connections() > 1, "nothing is shown: it was not connected");
    let id = tell(addrs[2], &["CLUSTER", "MYID"]);
    tell(addrs[2], &["FLUSHALL"]);
    tell(addrs[2], &["CLUSTER", "RESET", "HARD"]);
    for addr in &addrs[..2] {
        tell(*addr, &["CLUSTER", "FORGET", &id]);
    }
    tell(addrs[1], &["CLUSTER", "ADDSLOTSRANGE", "10922", "16383"]);
    eventually("another node has its slots", || async {
        _ = store.acquire(&request(&text)).await.map(drop);
        store.inspect(&name(&text)).await.is_ok()
    })
    .await;
    // One is the connection of this test.
    eventually("the connection is closed", || async { connections() == 1 }).await;
}

/// `CLUSTER SLOTS` goes on listing a primary that is gone. The store used to check the nodes one after the other and to fail at the
/// first one without a reply, so while one of three nodes was gone no new process of the fleet got any lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_opens_while_a_node_is_gone_or_silent() {
    for gone in [true, false] {
        let Some(mut cluster) = cluster() else { return };
        let names: Vec<String> = (0..3).flat_map(|node| names_at(&cluster, node, 1)).collect();
        match gone {
            true => cluster.node_mut(1).kill9(),
            false => cluster.nodes()[1].pause(),
        }
        let store = open(&format!("redis+cluster://{}?timeout=1s", cluster.addrs()[0])).await;
        for node in [0, 2] {
            let grant = take(&store, &request(&names[node])).await;
            give_back(&store, &grant.key).await;
        }
        let address = cluster.addrs()[1].to_string();
        let says_so = |finding: &Finding| {
            finding.text.contains(&address) && finding.text.contains("has not reported its settings")
        };
        assert!(store.profile().findings.iter().any(says_so), "{:?}", store.profile().findings);
        let missing = common::failed(&store, &request(&names[1])).await;
        assert!(matches!(missing, Error::Unavailable(_) | Error::Unknown(_)), "{missing:?}");
        match gone {
            true => cluster.node_mut(1).restart(),
            false => cluster.nodes()[1].resume(),
        }
        let again = request(&names[1]);
        eventually("the locks of the node are granted again", || async {
            matches!(store.acquire(&again).await, Ok(AcquireOutcome::Granted(_)))
        })
        .await;
    }
}
