//! A request that a node gets after the release of its attempt, and clients that fall silent.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use lockkeeper_core::{Locks, ReleaseOutcome, Store};
use lockkeeper_redlock::{Options, RedlockStore};
use lockkeeper_testkit::laws;
use lockkeeper_testkit::proxy::{Fault, Framing};

const TTL: Duration = Duration::from_secs(60);

/// The network delays a request to one node. The other nodes grant the lock, the client gives up the connection to that node, and
/// releases the lock. Then the request arrives, and takes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release_takes_nothing() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let store = fleet.open("young_node=0s&node_timeout=100ms&timeout=300ms").await;
    let proxy = &fleet.proxies[0];
    // A lock that the first node has too: its connection works, and what was sent on it before has been done.
    let takes_part = async || {
        eventually("the first node takes part", async || {
            let fresh = request("probe", TTL);
            let taken = granted(&store.acquire(&fresh).await);
            let everywhere = fleet.keys("probe").contains(&0);
            matches!(store.release(&fresh.key).await, Ok(ReleaseOutcome::Released)) && taken && everywhere
        })
        .await;
    };
    takes_part().await;
    let asked = request("late", TTL);
    let late = proxy.inject(Fault::at_request(1).hold());
    take(&store, &asked).await;
    assert!(late.fired(), "the first node was not asked");
    takes_part().await;
    assert_eq!(store.release(&asked.key).await.unwrap(), ReleaseOutcome::Released);
    takes_part().await;
    assert!(fleet.keys("late").is_empty());
    let before = proxy.count().replies;
    late.release();
    eventually("the late request is answered", async || proxy.count().replies > before).await;
    assert!(fleet.keys("late").is_empty(), "the lock is kept for a request that was released");
    // The attempt itself may be used again.
    take(&store, &asked).await;
    eventually("every node has it", async || fleet.keys("late").len() == NODES).await;
    assert_eq!(store.release(&asked.key).await.unwrap(), ReleaseOutcome::Released);
    fleet.nothing_left("late", "after the release").await;
}

/// The network delays the request to every node. No waiter has a queue entry in this store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_everywhere_after_its_release_takes_nothing() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let options = "young_node=0s&node_timeout=100ms&timeout=300ms&max_ttl=15m";
    let other = fleet.past_the_proxies(options).await;
    let store: Arc<dyn Store> = Arc::new(fleet.open(options).await);
    let late = Fault::at_request(1).hold();
    let arrived =
        laws::unknown::late_request_takes_nothing(&fleet.proxies[..], (&store, &other), late, false).await;
    assert!(arrived, "nothing is shown: a node did not answer the late request");
}

/// No waiter has a queue entry here, and a request that was given up leaves nothing else either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_was_given_up_leaves_nothing() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let options = "young_node=0s&node_timeout=100ms&timeout=300ms&max_ttl=15m";
    let other = fleet.past_the_proxies(options).await;
    let store: Arc<dyn Store> = Arc::new(fleet.open(options).await);
    laws::unknown::a_release_that_was_given_up_leaves_nothing(&fleet.proxies[..], &store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_was_released_meanwhile_is_not_reported() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let options = "young_node=0s&node_timeout=800ms&timeout=5s&max_ttl=15m";
    let store: Arc<dyn Store> = Arc::new(fleet.open(options).await);
    let other = fleet.past_the_proxies(options).await;
    laws::unknown::a_grant_that_was_released_meanwhile_is_not_reported(&store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let servers: Vec<_> = fleet.servers.iter().map(|server| server.addr()).collect();
    laws::wake::dead_clients_of_several_servers_cost_no_more_than_declared(
        &servers,
        Framing::Resp,
        async |addrs| {
            let hosts: Vec<String> = addrs.iter().map(ToString::to_string).collect();
            let options = "young_node=0s&node_timeout=500ms&timeout=2s&max_ttl=15m";
            let url = format!("redlock://{}?{options}", hosts.join(","));
            Arc::new(RedlockStore::open(Options::from_url(&url).unwrap()).await.unwrap()) as Arc<dyn Store>
        },
    )
    .await;
}
