//! The largest requests that are allowed.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{open, try_open};
use lockkeeper_core::{AcquireOutcome, Mode, RenewOutcome, Store, Wait, limits};
use lockkeeper_testkit::laws::{
    give_back, granted, is_free, join_queue, name, refused, request, request_all, take, with,
};
use lockkeeper_testkit::servers::{self, EtcdOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_may_have_the_maximum_of_names() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
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
async fn two_hundred_readers_are_broken_as_a_whole() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
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

/// More keys than one transaction changes, in grants of several names: no grant is ended or revoked in part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_grants_is_changed_as_a_whole() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let reader = || with(request_all(&["a", "b", "c"]), |request| request.mode = Mode::Shared);
    let mut readers = Vec::new();
    for _ in 0..30 {
        readers.push(take(&store, &reader()).await);
    }
    let newest = readers.iter().map(|reader| reader.fence).max().unwrap();
    let fence = other.revoke(&name("a"), "all of them").await.unwrap();
    assert!(fence > newest);
    for text in ["a", "b", "c"] {
        let view = other.inspect(&name(text)).await.unwrap().expect("it is held");
        assert!(view.held.iter().all(|held| held.revoked.as_deref() == Some("all of them")), "{text}");
    }
    let outcome = store.renew(&readers).await.unwrap();
    assert!(outcome.iter().all(|one| *one == RenewOutcome::Revoked("all of them".into())), "{outcome:?}");
    assert!(other.break_lock(&name("a"), "at once").await.unwrap() > fence);
    for text in ["a", "b", "c"] {
        let found = other.inspect(&name(text)).await.unwrap();
        assert!(found.is_none(), "{text}: {found:?}");
    }
}

/// With a long election timeout etcd gives no short leases. The queue entry of a dead process stays longer than its
/// claim, and the declared time includes that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_declared_time_counts_the_shortest_lease_of_the_server() {
    let extra = vec!["--election-timeout=10000".into(), "--heartbeat-interval=1000".into()];
    let Ok(server) = servers::etcd(EtcdOptions { extra, ..EtcdOptions::default() }) else { return };
    let store = try_open(&format!("etcd://{}?timeout=20s&poll=5s&claim=2s", server.addr())).await.unwrap();
    let held = take(&store, &request("x")).await;
    let waiter = join_queue(&store, &request("x"), 1).await;
    let wake = store.profile().wake;
    assert!(wake >= Duration::from_secs(5 + 15), "a lease lasts 15 s here, and {wake:?} are declared");
    give_back(&store, &held.key).await;
    granted(waiter).await;
}
