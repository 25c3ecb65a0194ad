//! A node that takes requests and answers none. A vote stops waiting for it long before its connection is given up, so
//! nearly all requests to it are cancelled: they must not count as answered.

mod common;

use std::time::{Duration, Instant};

use common::*;
use lockkeeper_core::{Locks, ReleaseOutcome};
use lockkeeper_testkit::proxy::Direction;

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
        let mut votes = 0;
        while silent.count().connections == before {
            let mine = request("orders/42", TTL);
            assert!(granted(&store.acquire(&mine).await), "{direction:?}: four of five nodes answer");
            assert_eq!(store.release(&mine.key).await.unwrap(), ReleaseOutcome::Released);
            votes += 1;
            assert!(
                since.elapsed() < TIMEOUT * 8,
                "{direction:?}: {votes} votes, and still the same connection after {:?}",
                since.elapsed()
            );
        }
        assert!(
            since.elapsed() > TIMEOUT / 2,
            "{direction:?}: it was given up too soon: {:?}",
            since.elapsed()
        );
        assert!(votes > 3, "{direction:?}: {votes} votes lost patience");
        silent.heal();
        fleet.nothing_left("orders/42", "after the heal").await;
    }
}
