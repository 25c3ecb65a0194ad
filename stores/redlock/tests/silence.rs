//! A node that takes requests and answers none. A vote stops waiting for it long before its connection is given up, so
//! nearly all requests to it are cancelled: they must not count as answered.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use lockkeeper_core::{Locks, ReleaseOutcome, Store};
use lockkeeper_redlock::{Options, RedlockStore};
use lockkeeper_testkit::laws;
use lockkeeper_testkit::proxy::{Direction, Framing};

const TTL: Duration = Duration::from_secs(20);
const TIMEOUT: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_connection_is_given_up_while_votes_lose_patience() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let store = fleet.open("young_node=0s&node_timeout=100ms&timeout=1s").await;
    let silent = &fleet.proxies[0];
    for direction in [Direction::Requests, Direction::Replies] {
        eventually("every node takes part", async || {
            let fresh = request("orders/42", TTL);
            let granted = granted(&store.acquire(&fresh).await);
            tokio::time::sleep(Duration::from_millis(20)).await;
            let everywhere = fleet.keys("orders/42").len() == NODES;
            granted & matches!(store.release(&fresh.key).await, Ok(ReleaseOutcome::Released)) && everywhere
        })
        .await;
        let before = silent.count().connections;
        silent.hold(direction);
        let since = Instant::now();
        let mut calls = 0;
        while silent.count().connections == before {
            let mine = request("orders/42", TTL);
            // On a busy machine the other nodes may be too late as well, and the outcome is not what this is about.
            _ = store.acquire(&mine).await;
            _ = store.release(&mine.key).await;
            calls += 2;
            assert!(
                since.elapsed() < TIMEOUT * 8,
                "{direction:?}: {calls} calls, and still the same connection after {:?}",
                since.elapsed()
            );
        }
        assert!(
            since.elapsed() > TIMEOUT / 2,
            "{direction:?}: it was given up too soon: {:?}",
            since.elapsed()
        );
        assert!(calls > 3, "{direction:?}: {calls} calls lost patience");
        silent.heal();
        fleet.nothing_left("orders/42", "after the heal").await;
    }
}

/// The law of all stores, with all nodes silent at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_nodes_are_noticed_while_callers_come_and_go() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let servers: Vec<_> = fleet.servers.iter().map(|server| server.addr()).collect();
    laws::silence::silent_servers_are_noticed_while_callers_come_and_go(
        &servers,
        Framing::Resp,
        async |addrs| {
            let hosts: Vec<String> = addrs.iter().map(ToString::to_string).collect();
            let options = "young_node=0s&node_timeout=500ms&timeout=1s&max_ttl=15m";
            let url = format!("redlock://{}?{options}", hosts.join(","));
            Arc::new(RedlockStore::open(Options::from_url(&url).unwrap()).await.unwrap()) as Arc<dyn Store>
        },
    )
    .await;
}
