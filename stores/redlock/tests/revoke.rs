//! Revoking a lock by the vote of the nodes.

mod common;

use std::time::Duration;

use common::*;
use lockkeeper_core::{Error, LockName, Locks, ReleaseOutcome, RenewOutcome};
use lockkeeper_testkit::proxy::Direction;
use lockkeeper_testkit::servers::redis_call;

const TTL: Duration = Duration::from_secs(20);

/// Two of five nodes do not hear of the revoke and would renew: they are no majority.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_did_not_hear_of_a_revoke_cannot_renew_without_the_others() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let store = fleet.open("young_node=0s&node_timeout=500ms&timeout=2s").await;
    let (asked, name) = (request("orders/42", TTL), LockName::new("orders/42").unwrap());
    let held = take(&store, &asked).await;
    eventually("every node has it", async || fleet.keys("orders/42").len() == NODES).await;
    for direction in [Direction::Requests, Direction::Replies] {
        fleet.proxies[..NODES - QUORUM].iter().for_each(|proxy| proxy.hold(direction));
    }
    let fence = store.revoke(&name, "the host is drained").await.unwrap();
    assert!(fence > held.fence);
    fleet.proxies[..NODES - QUORUM].iter().for_each(|proxy| proxy.cut_all());
    fleet.proxies[..NODES - QUORUM].iter().for_each(|proxy| proxy.heal());
    // Also when the nodes that did not hear of it answer again.
    eventually("all nodes answer", async || {
        let fresh = request("probe", TTL);
        let taken = granted(&store.acquire(&fresh).await);
        let everywhere = fleet.keys("probe").len() == NODES;
        matches!(store.release(&fresh.key).await, Ok(ReleaseOutcome::Released)) && taken && everywhere
    })
    .await;
    let told = store.renew(std::slice::from_ref(&held)).await.unwrap();
    assert_eq!(told, [RenewOutcome::Revoked("the host is drained".into())]);
    let again = store.acquire(&asked).await;
    assert!(matches!(&again, Err(Error::Lost(why)) if why.contains("the host is drained")), "{again:?}");
    assert_eq!(store.release(&asked.key).await.unwrap(), ReleaseOutcome::Released);
    take(&store, &request("orders/42", TTL)).await;
}

/// A foreign client renews without asking us: it would never learn that it is to stop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_of_another_client_cannot_be_revoked() {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let store = fleet.open("young_node=0s&node_timeout=500ms&timeout=2s").await;
    for server in &fleet.servers {
        redis_call(server.addr(), &["SET", "lock:orders/42", "theirs", "PX", "20000"]).unwrap();
    }
    let refused = store.revoke(&LockName::new("orders/42").unwrap(), "the host is drained").await;
    assert!(matches!(&refused, Err(Error::Unsupported(_))), "{refused:?}");
    for server in &fleet.servers {
        assert_eq!(redis_call(server.addr(), &["GET", "lock:orders/42"]).unwrap(), "theirs");
    }
}
