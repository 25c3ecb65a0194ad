//! What travels in one transaction happens as a whole or not at all. Nobody may notice that it had company.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open, tree, wipe};
use futures_util::future::join_all;
use lockkeeper_core::{Ask, Fence, Grant, Mode, Release, Renewal, Store};
use lockkeeper_testkit::laws::{ask, give_back, granted, is_free, stand_in_line, take, with};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

const MANY: usize = 100;

fn asks() -> Vec<Ask> {
    (0..MANY).map(|i| ask(&format!("task{i}"))).collect()
}

async fn take_all(store: &Arc<dyn Store>, asks: &[Ask]) -> Vec<Grant> {
    join_all(asks.iter().map(|ask| take(store, ask))).await
}

async fn release_all(store: &Arc<dyn Store>, grants: &[Grant]) -> Vec<Release> {
    let answers = join_all(grants.iter().map(|grant| store.release(&grant.claim))).await;
    answers.into_iter().map(|answer| answer.unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_cannot_happen_does_not_keep_the_others_from_it() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let first = take_all(&store, &asks()).await;
    // Two are taken away by hand: one as a whole, one with the node of its line left.
    wipe(&admin, "/lock/task7").await;
    for node in tree(&admin, "/lock/task8").await.iter().filter(|node| node.contains("-lock-")) {
        admin.delete(node, None).await.unwrap();
    }
    for (i, answer) in release_all(&store, &first).await.into_iter().enumerate() {
        let expected = if i == 7 || i == 8 { Release::AlreadyGone } else { Release::Released };
        assert_eq!(answer, expected, "task{i}");
    }
    // The node of one line is missing, and those of all others are known to be there.
    wipe(&admin, "/lock/task9").await;
    let second = take_all(&store, &asks()).await;
    assert!(first.iter().zip(&second).all(|(first, second)| second.fence > first.fence));
    assert!(store.renew(&second).await.unwrap().iter().all(|answer| *answer == Renewal::Renewed));
    assert!(release_all(&store, &second).await.iter().all(|answer| *answer == Release::Released));
    assert!(tree(&admin, "/lock").await.iter().all(|node| !node.contains("-lock-")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_are_let_in_together_have_fences_of_their_own() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store = open(server.addr()).await;
    let writer = take(&store, &ask("x")).await;
    let mut readers = Vec::new();
    for place in 1..=20 {
        let reader = with(ask("x"), |ask| ask.mode = Mode::Shared);
        readers.push(stand_in_line(&store, &reader, place).await);
    }
    give_back(&store, &writer.claim).await;
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
async fn a_long_ttl_is_noted_when_it_is_renewed_and_not_before() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let notes = async || tree(&admin, "/lock").await.iter().filter(|node| node.contains("=back-")).count();
    let long = |text: &str| with(ask(text), |ask| ask.ttl = Duration::from_secs(600));
    let held = [take(&store, &long("x")).await, take(&store, &long("y")).await];
    assert!(held.iter().all(|grant| grant.lease < grant.ttl), "the session may end sooner: {held:?}");
    assert_eq!(notes().await, 0);
    for _ in 0..2 {
        assert_eq!(store.renew(&held).await.unwrap(), [Renewal::Renewed, Renewal::Renewed]);
        assert_eq!(notes().await, 2);
    }
    // Asked again it is the same grant, and what was noted counts.
    let again = with(long("x"), |ask| ask.claim = held[0].claim.clone());
    let again = take(&store, &again).await;
    assert_eq!((again.fence, again.lease), (held[0].fence, held[0].ttl));
    // What is renewed while it is given back leaves nothing.
    for grant in &held {
        give_back(&store, &grant.claim).await;
    }
    for _ in 0..50 {
        let held = take(&store, &long("x")).await;
        let (renewed, released) =
            tokio::join!(store.renew(std::slice::from_ref(&held)), store.release(&held.claim));
        assert_eq!(released.unwrap(), Release::Released);
        renewed.unwrap();
        assert_eq!(notes().await, 0);
    }
}
