//! Renewals of many grants in one call: every grant has an answer of its own.

mod common;

use std::time::{Duration, Instant};

use common::*;
use lockkeeper_core::{Grant, Locks, RenewOutcome};
use lockkeeper_redlock::RedlockStore;
use lockkeeper_testkit::proxy::Direction;
use lockkeeper_testkit::servers::redis_call;

const TTL: Duration = Duration::from_secs(20);
const CALM: &str = "young_node=0s&node_timeout=500ms&timeout=5s";

async fn start() -> Option<Fleet> {
    tokio::task::spawn_blocking(Fleet::start).await.unwrap()
}

/// Takes a lock and waits until every node has it.
async fn take_everywhere(fleet: &Fleet, store: &RedlockStore, name: &str, ttl: Duration) -> Grant {
    let grant = take(store, &request(name, ttl)).await;
    eventually("every node has the lock", async || fleet.keys(name).len() == NODES).await;
    grant
}

fn forget(fleet: &Fleet, name: &str, nodes: std::ops::Range<usize>) {
    for node in nodes {
        redis_call(fleet.servers[node].addr(), &["DEL", &format!("lock:{name}")]).unwrap();
    }
}

/// Node 4 does not answer. `open` is known to two of the other four, which decides nothing; `gone` to none of them, which
/// is a loss whatever node 4 would say; `kept` to all four.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_renewal_a_loss_and_a_renewal_are_told_apart() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    let open = take_everywhere(&fleet, &store, "open", TTL).await;
    let gone = take_everywhere(&fleet, &store, "gone", TTL).await;
    let kept = take_everywhere(&fleet, &store, "kept", TTL).await;
    forget(&fleet, "open", 0..2);
    forget(&fleet, "gone", 0..4);
    fleet.proxies[4].hold(Direction::Requests);
    let answers = store.renew(&[open.clone(), kept.clone()]).await.unwrap();
    assert_eq!(answers, [RenewOutcome::Unknown, RenewOutcome::Renewed]);
    let answers = store.renew(&[open.clone(), gone.clone()]).await.unwrap();
    assert_eq!(answers, [RenewOutcome::Unknown, RenewOutcome::Lost], "the loss is certain");
    let answers = store.renew(&[gone, open.clone(), kept.clone()]).await.unwrap();
    assert_eq!(answers, [RenewOutcome::Lost, RenewOutcome::Unknown, RenewOutcome::Renewed]);
    // Nothing is known of any of them: that is an error, with its reason.
    assert!(store.renew(std::slice::from_ref(&open)).await.is_err());
    fleet.proxies[4].heal();
    eventually("the third node answers, and the unknown one is renewed", async || {
        let answers = store.renew(&[open.clone(), kept.clone()]).await;
        matches!(answers.as_deref(), Ok([RenewOutcome::Renewed, RenewOutcome::Renewed]))
    })
    .await;
    eventually("it is put back where it was missing", async || fleet.keys("open").len() == NODES).await;
}

/// One grant more than a script renews at once: the one that is left over is the uncertain one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_renewal_makes_no_error_for_hundreds() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    let mut grants = Vec::new();
    for i in 0..200 {
        grants.push(take(&store, &request(&format!("lock-{i}"), TTL)).await);
    }
    grants.push(take_everywhere(&fleet, &store, "open", TTL).await);
    forget(&fleet, "open", 0..2);
    fleet.proxies[4].hold(Direction::Requests);
    let answers = store.renew(&grants).await.expect("two hundred were renewed");
    assert_eq!(answers.iter().filter(|answer| **answer == RenewOutcome::Renewed).count(), 200);
    assert_eq!(answers[200], RenewOutcome::Unknown);
}

/// A node that keeps something else under the name of one lock answers for all the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_type_fails_one_renewal_and_not_its_neighbours() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    let odd = take_everywhere(&fleet, &store, "odd", TTL).await;
    let kept = take_everywhere(&fleet, &store, "kept", TTL).await;
    for node in 0..QUORUM {
        let server = fleet.servers[node].addr();
        redis_call(server, &["DEL", "lock:odd"]).unwrap();
        redis_call(server, &["RPUSH", "lock:odd", "a list"]).unwrap();
    }
    let answers = store.renew(&[odd.clone(), kept]).await.unwrap();
    assert_eq!(answers, [RenewOutcome::Lost, RenewOutcome::Renewed]);
    store.release(&odd.key).await.unwrap();
    eventually("the nodes that had it released it", async || fleet.keys("odd") == [0, 1, 2]).await;
}

/// A majority is enough for an answer: a silent node does not delay it, or a short lease would end before its renewal is
/// known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_node_does_not_delay_a_renewal() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open("young_node=0s&node_timeout=60s&timeout=90s&max_ttl=300s").await;
    let [short, long] = [240, 300].map(Duration::from_secs);
    let short = take_everywhere(&fleet, &store, "short", short).await;
    let long = take_everywhere(&fleet, &store, "long", long).await;
    fleet.proxies[0].hold(Direction::Requests);
    let began = Instant::now();
    assert_eq!(store.renew(std::slice::from_ref(&long)).await.unwrap(), [RenewOutcome::Renewed]);
    assert_eq!(store.renew(&[long, short]).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Renewed]);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}
