//! Many who wait. What is counted are the server's requests, not the time.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{handled, keeper, try_open};
use futures_util::StreamExt;
use futures_util::future::join_all;
use lockkeeper_core::{Acquired, EventKind, Renewal, Store, Wait};
use lockkeeper_testkit::laws::{ask, eventually, give_back, name, set_patience, soon, take, with};
use lockkeeper_testkit::servers::{self, EtcdOptions, Server};

async fn patient(server: &Server) -> Arc<dyn Store> {
    // Looking now and then is counted too, but it is by the clock: rare enough not to hide what is counted here.
    try_open(&format!("etcd://{}?poll=10m&claim=60s&timeout=20s", server.addr())).await.unwrap()
}

/// The transactions per hand-off when so many stand in line.
async fn per_hand_off(waiters: usize) -> Option<f64> {
    let server = servers::etcd(EtcdOptions::default()).ok()?;
    let store = patient(&server).await;
    let held = take(&store, &ask("popular")).await;
    let mut crowd = Vec::new();
    for _ in 0..4 {
        let store = patient(&server).await;
        for _ in 0..waiters / 4 {
            let store = store.clone();
            crowd.push(tokio::spawn(async move {
                let ask = with(ask("popular"), |ask| ask.wait = Wait::Forever);
                let grant = match store.acquire(&ask).await {
                    Ok(Acquired::Granted(grant)) => grant,
                    other => panic!("not served: {other:?}"),
                };
                give_back(&store, &grant.claim).await;
                grant.fence
            }));
        }
    }
    eventually("all stand in line", || async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == waiters)
    })
    .await;
    let before = handled(server.addr(), "Txn");
    give_back(&store, &held.claim).await;
    let mut fences = Vec::new();
    for one in crowd {
        fences.push(one.await.unwrap());
    }
    let calls = handled(server.addr(), "Txn") - before;
    fences.sort();
    fences.dedup();
    assert_eq!(fences.len(), waiters, "everybody has a fence of its own");
    assert!(store.inspect(&name("popular")).await.unwrap().is_none());
    Some(calls as f64 / waiters as f64)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_costs_the_same_however_many_wait() {
    // They join one by one, which takes two thousand of them most of a minute.
    set_patience(Duration::from_secs(180));
    let crowd = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 2000 } else { 500 };
    let (Some(few), Some(many)) = (per_hand_off(100).await, per_hand_off(crowd).await) else { return };
    println!("transactions per hand-off: {few:.2} with 100 waiters, {many:.2} with {crowd}");
    // One to give back, one to look, one to take it.
    assert!(few < 3.3 && many < 3.3, "{few} {many}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_guards_are_renewed_together() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    let asks: Vec<_> = (0..640).map(|i| ask(&format!("guard/{i}"))).collect();
    let before = handled(server.addr(), "Txn");
    let grants = join_all(asks.iter().map(|ask| take(&store, ask))).await;
    let taken = handled(server.addr(), "Txn") - before;
    assert!(taken < 60, "asks that come together travel together: {taken}");
    let before = handled(server.addr(), "Txn");
    assert!(store.renew(&grants).await.unwrap().iter().all(|answer| *answer == Renewal::Renewed));
    let renewed = handled(server.addr(), "Txn") - before;
    assert!(renewed <= 24, "{renewed} transactions for 640 renewals");
}

/// A key that is gone does not say why: its lease is asked for, and all of these have the same one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_that_happen_together_are_told_together() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    let asks: Vec<_> = (0..300).map(|i| ask(&format!("guard/{i}"))).collect();
    let grants = join_all(asks.iter().map(|ask| take(&store, ask))).await;
    let mut events = store.watch("guard/").await.unwrap();
    let before = handled(server.addr(), "LeaseTimeToLive");
    join_all(grants.iter().map(|grant| give_back(&store, &grant.claim))).await;
    for _ in &grants {
        let event = soon("an event comes", events.next()).await.unwrap().unwrap();
        assert!(matches!(event.kind, EventKind::Released { .. }), "{event:?}");
    }
    let asked = handled(server.addr(), "LeaseTimeToLive") - before;
    assert!(asked < 60, "{asked} questions about one lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_costs_its_claim_and_no_more() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let url = format!("etcd://{}?claim=2s", server.addr());
    let (store, dead) = (try_open(&url).await.unwrap(), try_open(&url).await.unwrap());
    let held = take(&store, &ask("popular")).await;
    let gone = {
        let keeper = keeper(&dead);
        tokio::spawn(async move { keeper.lock("popular").acquire().await.map(drop) })
    };
    eventually("it stands in line", || async {
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == 1)
    })
    .await;
    // Its whole thread is gone, as if the process were; nobody is left to take it back.
    gone.abort();
    drop(dead);
    give_back(&store, &held.claim).await;
    let patient = with(ask("popular"), |ask| ask.wait = Wait::For(Duration::from_secs(20)));
    let served = store.acquire(&patient).await;
    assert!(matches!(served, Ok(Acquired::Granted(_))), "{served:?}");
}
