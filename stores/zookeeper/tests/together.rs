//! Batched transactions are applied completely or not at all. No caller may notice that its transaction was in a
//! batch.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open, tree, wipe};
use futures_util::future::join_all;
use lockkeeper_core::{Fence, Grant, LockRequest, Mode, ReleaseOutcome, RenewOutcome, Store};
use lockkeeper_testkit::laws::{give_back, granted, is_free, join_queue, request, take, with};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

const MANY: usize = 100;

fn requests() -> Vec<LockRequest> {
    (0..MANY).map(|i| request(&format!("task{i}"))).collect()
}

async fn take_all(store: &Arc<dyn Store>, requests: &[LockRequest]) -> Vec<Grant> {
    join_all(requests.iter().map(|request| take(store, request))).await
}

async fn release_all(store: &Arc<dyn Store>, grants: &[Grant]) -> Vec<ReleaseOutcome> {
    let answers = join_all(grants.iter().map(|grant| store.release(&grant.key))).await;
    answers.into_iter().map(|answer| answer.unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_transaction_does_not_fail_its_batch() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let first = take_all(&store, &requests()).await;
    // An administrator deletes two: one with its queue node, one without.
    wipe(&admin, "/lock/task7").await;
    for node in tree(&admin, "/lock/task8").await.iter().filter(|node| node.contains("-lock-")) {
        admin.delete(node, None).await.unwrap();
    }
    for (i, answer) in release_all(&store, &first).await.into_iter().enumerate() {
        let expected = if i == 7 || i == 8 { ReleaseOutcome::AlreadyGone } else { ReleaseOutcome::Released };
        assert_eq!(answer, expected, "task{i}");
    }
    // One queue node is missing, and the store remembers that all exist.
    wipe(&admin, "/lock/task9").await;
    let second = take_all(&store, &requests()).await;
    assert!(first.iter().zip(&second).all(|(first, second)| second.fence > first.fence));
    assert!(store.renew(&second).await.unwrap().iter().all(|answer| *answer == RenewOutcome::Renewed));
    assert!(release_all(&store, &second).await.iter().all(|answer| *answer == ReleaseOutcome::Released));
    assert!(tree(&admin, "/lock").await.iter().all(|node| !node.contains("-lock-")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_holders_granted_together_have_different_fences() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store = open(server.addr()).await;
    let writer = take(&store, &request("x")).await;
    let mut readers = Vec::new();
    for place in 1..=20 {
        let reader = with(request("x"), |request| request.mode = Mode::Shared);
        readers.push(join_queue(&store, &reader, place).await);
    }
    give_back(&store, &writer.key).await;
    let served = join_all(readers.into_iter().map(granted)).await;
    let mut fences: Vec<Fence> = served.iter().map(|grant| grant.fence).collect();
    fences.sort();
    fences.dedup();
    assert_eq!(fences.len(), served.len());
    assert!(fences[0] > writer.fence);
    release_all(&store, &served).await;
    is_free(&store, "x").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_renewal_of_a_long_ttl_writes_the_hold_back() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let notes =
        async || tree(&admin, "/lock").await.iter().filter(|node| node.contains("=hold-back-")).count();
    let long = |text: &str| with(request(text), |request| request.ttl = Duration::from_secs(600));
    let held = [take(&store, &long("x")).await, take(&store, &long("y")).await];
    assert!(held.iter().all(|grant| grant.lease < grant.ttl), "the session may end sooner: {held:?}");
    assert_eq!(notes().await, 0);
    for _ in 0..2 {
        assert_eq!(store.renew(&held).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Renewed]);
        assert_eq!(notes().await, 2);
    }
    // A retry returns the same grant, with the lease of the hold-back node.
    let again = with(long("x"), |request| request.key = held[0].key.clone());
    let again = take(&store, &again).await;
    assert_eq!((again.fence, again.lease), (held[0].fence, held[0].ttl));
    // A renewal during a release leaves no node.
    for grant in &held {
        give_back(&store, &grant.key).await;
    }
    for _ in 0..50 {
        let held = take(&store, &long("x")).await;
        let (renewed, released) =
            tokio::join!(store.renew(std::slice::from_ref(&held)), store.release(&held.key));
        assert_eq!(released.unwrap(), ReleaseOutcome::Released);
        renewed.unwrap();
        assert_eq!(notes().await, 0);
    }
}
