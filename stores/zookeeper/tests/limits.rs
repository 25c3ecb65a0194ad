//! The largest requests that are allowed.

mod common;

use std::sync::Arc;

use common::open;
use lockkeeper_core::{AcquireOutcome, Mode, RenewOutcome, Store, Wait, limits};
use lockkeeper_testkit::laws::{
    give_back, granted, is_free, name, refused, request, request_all, take, with,
};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_may_have_the_maximum_of_names() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store: Arc<dyn Store> = open(server.addr()).await;
    let long = "n".repeat(limits::NAME_BYTES - 2);
    let names: Vec<String> = (0..limits::NAMES).map(|i| format!("{i:02}{long}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let held = take(&store, &request_all(&names)).await;
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    refused(&store, &request_all(&names)).await;
    let (store2, patient) =
        (store.clone(), with(request_all(&names), |request| request.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { store2.acquire(&patient).await });
    lockkeeper_testkit::laws::queue_reaches(&store, &name(names[63]), 1).await;
    give_back(&store, &held.key).await;
    let next = granted(waiter).await;
    assert!(next.fence > held.fence);
    // A grant of several names is lost as a whole.
    let broken = store.break_lock(&name(names[40]), "to see").await.unwrap();
    assert!(broken > next.fence);
    assert_eq!(store.renew(&[next]).await.unwrap(), [RenewOutcome::Lost]);
    for text in names {
        is_free(&store, text).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_shared_holders_are_broken_together() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store = open(server.addr()).await;
    let mut readers = Vec::new();
    for _ in 0..200 {
        readers.push(take(&store, &with(request("x"), |request| request.mode = Mode::Shared)).await);
    }
    let newest = readers.iter().map(|reader| reader.fence).max().unwrap();
    assert!(store.break_lock(&name("x"), "all of them").await.unwrap() > newest);
    assert!(store.renew(&readers).await.unwrap().iter().all(|answer| *answer == RenewOutcome::Lost));
    assert!(matches!(store.acquire(&request("x")).await, Ok(AcquireOutcome::Granted(_))));
}
