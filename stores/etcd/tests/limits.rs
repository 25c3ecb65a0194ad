//! As much as may be asked for at once.

mod common;

use std::sync::Arc;

use common::open;
use lockkeeper_core::{Acquired, Mode, Renewal, Store, Wait, limits};
use lockkeeper_testkit::laws::{ask, ask_all, give_back, granted, is_free, name, refused, take, with};
use lockkeeper_testkit::servers::{self, EtcdOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ask_may_have_as_many_names_as_it_may_have() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store: Arc<dyn Store> = open(server.addr()).await;
    let long = "n".repeat(limits::NAME_BYTES - 2);
    let names: Vec<String> = (0..limits::NAMES).map(|i| format!("{i:02}{long}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let held = take(&store, &ask_all(&names)).await;
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Renewed]);
    refused(&store, &ask_all(&names)).await;
    let (store2, patient) = (store.clone(), with(ask_all(&names), |ask| ask.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { store2.acquire(&patient).await });
    lockkeeper_testkit::laws::in_line(&store, &name(names[63]), 1).await;
    give_back(&store, &held.claim).await;
    let next = granted(waiter).await;
    assert!(next.fence > held.fence);
    // A grant of several names is lost as a whole.
    let broken = store.break_lock(&name(names[40]), "to see").await.unwrap();
    assert!(broken > next.fence);
    assert_eq!(store.renew(&[next]).await.unwrap(), [Renewal::Lost]);
    for text in names {
        is_free(&store, text).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_readers_is_broken_as_a_whole() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let mut readers = Vec::new();
    for _ in 0..200 {
        readers.push(take(&store, &with(ask("x"), |ask| ask.mode = Mode::Shared)).await);
    }
    let newest = readers.iter().map(|reader| reader.fence).max().unwrap();
    assert!(store.break_lock(&name("x"), "all of them").await.unwrap() > newest);
    assert!(store.renew(&readers).await.unwrap().iter().all(|answer| *answer == Renewal::Lost));
    assert!(matches!(store.acquire(&ask("x")).await, Ok(Acquired::Granted(_))));
}

/// More keys than one transaction changes, of grants that have several: none of them is ended, or marked, by halves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_of_a_crowd_is_changed_as_a_whole() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let reader = || with(ask_all(&["a", "b", "c"]), |ask| ask.mode = Mode::Shared);
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
    let told = store.renew(&readers).await.unwrap();
    assert!(told.iter().all(|one| *one == Renewal::Revoked("all of them".into())), "{told:?}");
    assert!(other.break_lock(&name("a"), "at once").await.unwrap() > fence);
    for text in ["a", "b", "c"] {
        let found = other.inspect(&name(text)).await.unwrap();
        assert!(found.is_none(), "{text}: {found:?}");
    }
}
