//! Many waiters. These tests count the server's requests, not the time.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{bytes_sent, handled, keeper, try_open};
use futures_util::StreamExt;
use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, EventKind, Mode, RenewOutcome, Store, Wait};
use lockkeeper_testkit::laws::{
    eventually, give_back, name, queue_reaches, request, request_all, set_patience, soon, take, with,
};
use lockkeeper_testkit::scenarios::crowd::{an_owner_among_sharers, take_many};
use lockkeeper_testkit::servers::{self, EtcdOptions, Server};

async fn patient(server: &Server) -> Arc<dyn Store> {
    // Polls are counted too: with this interval they are too rare to matter.
    try_open(&format!("etcd://{}?poll=10m&claim=60s&timeout=20s", server.addr())).await.unwrap()
}

/// The transactions per hand-off with this many waiters.
async fn per_hand_off(waiters: usize) -> Option<f64> {
    let server = servers::etcd(EtcdOptions::default()).ok()?;
    let store = patient(&server).await;
    let held = take(&store, &request("popular")).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.extend(lockkeeper_testkit::scenarios::crowd::join(&patient(&server).await, waiters / 4));
    }
    eventually("all waiters are queued", || async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == waiters)
    })
    .await;
    let before = handled(server.addr(), "Txn");
    give_back(&store, &held.key).await;
    lockkeeper_testkit::scenarios::crowd::all_granted(waiting).await;
    let calls = handled(server.addr(), "Txn") - before;
    assert!(store.inspect(&name("popular")).await.unwrap().is_none());
    Some(calls as f64 / waiters as f64)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_costs_the_same_however_many_wait() {
    // The waiters enqueue one by one: 2,000 of them take most of a minute.
    set_patience(Duration::from_secs(180));
    let crowd = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 2000 } else { 500 };
    let (Some(few), Some(many)) = (per_hand_off(100).await, per_hand_off(crowd).await) else { return };
    println!("transactions per hand-off: {few:.2} with 100 waiters, {many:.2} with {crowd}");
    // One to release, one to read the queue, one to take the lock.
    assert!(few < 3.3 && many < 3.3, "{few} {many}");
}

/// How many bytes the server sends for one shared acquire of these names beside this many holders, with and without a wait.
async fn bytes_per_sharer(server: &Server, store: &Arc<dyn Store>, names: &[&str], holders: usize) -> f64 {
    let shared = || with(request_all(names), |request| request.mode = Mode::Shared);
    take_many(store, holders, shared).await;
    let before = bytes_sent(server);
    for round in 0..10 {
        let wait = if round % 2 == 0 { Wait::No } else { Wait::Forever };
        let sharer = take(store, &with(shared(), |request| request.wait = wait)).await;
        give_back(store, &sharer.key).await;
    }
    (bytes_sent(server) - before) / 10.0
}

/// A sharer that is granted behind a sharer needs to read no other holder: with many holders, each acquire read all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sharer_costs_the_same_however_many_share() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    for (few, many) in [(vec!["few"], vec!["many"]), (vec!["few/a", "few/b"], vec!["many/a", "many/b"])] {
        let bytes = bytes_per_sharer(&server, &store, &few, 50).await;
        let more = bytes_per_sharer(&server, &store, &many, 200).await;
        println!("bytes per shared acquire of {many:?}: {bytes} beside 50 holders, {more} beside 200");
        assert!(more < bytes * 1.5, "{bytes} {more}");
        let view = store.inspect(&name(many[0])).await.unwrap().unwrap();
        assert_eq!(view.held.len(), 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_is_found_among_many_sharers() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    an_owner_among_sharers(&patient(&server).await).await;
}

/// The bytes that the server sends for a permit of ten that a waiter is granted, in a queue of this many.
async fn bytes_per_permit(server: &Server, store: &Arc<dyn Store>, name: &str, waiters: usize) -> f64 {
    let permit =
        || with(request(name), |request| (request.mode, request.wait) = (Mode::Permit(10), Wait::Forever));
    let requests: Vec<_> = (0..10).map(|_| permit()).collect();
    let held = join_all(requests.iter().map(|request| take(store, request))).await;
    let crowd: Vec<_> = (0..waiters)
        .map(|_| {
            let (store, request) = (store.clone(), permit());
            tokio::spawn(async move { give_back(&store, &take(&store, &request).await.key).await })
        })
        .collect();
    queue_reaches(store, &lockkeeper_testkit::laws::name(name), waiters).await;
    let before = bytes_sent(server);
    for grant in held {
        give_back(store, &grant.key).await;
    }
    soon("all are granted a permit", join_all(crowd)).await;
    (bytes_sent(server) - before) / waiters as f64
}

/// A counted request behind a waiter waits, and one behind a holder needs to know the holders: with many waiters, each read all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_costs_the_same_however_many_wait() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    let few = bytes_per_permit(&server, &store, "few", 80).await;
    let many = bytes_per_permit(&server, &store, "many", 240).await;
    println!("bytes per permit: {few} with 80 waiters, {many} with 240");
    assert!(many < few * 1.6, "{few} {many}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_guards_are_renewed_together() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    let requests: Vec<_> = (0..640).map(|i| request(&format!("guard/{i}"))).collect();
    let before = handled(server.addr(), "Txn");
    let grants = join_all(requests.iter().map(|request| take(&store, request))).await;
    let taken = handled(server.addr(), "Txn") - before;
    assert!(taken < 60, "concurrent requests share transactions: {taken}");
    let before = handled(server.addr(), "Txn");
    assert!(store.renew(&grants).await.unwrap().iter().all(|answer| *answer == RenewOutcome::Renewed));
    let renewed = handled(server.addr(), "Txn") - before;
    assert!(renewed <= 24, "{renewed} transactions for 640 renewals");
}

/// A deleted key does not say why: the store looks its lease up, and all of these keys have the same one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_releases_are_reported_together() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    let requests: Vec<_> = (0..300).map(|i| request(&format!("guard/{i}"))).collect();
    let grants = join_all(requests.iter().map(|request| take(&store, request))).await;
    let mut events = store.watch("guard/").await.unwrap();
    let before = handled(server.addr(), "LeaseTimeToLive");
    join_all(grants.iter().map(|grant| give_back(&store, &grant.key))).await;
    for _ in &grants {
        let event = soon("an event comes", events.next()).await.unwrap().unwrap();
        assert!(matches!(event.kind, EventKind::Released { .. }), "{event:?}");
    }
    let asked = handled(server.addr(), "LeaseTimeToLive") - before;
    assert!(asked < 60, "{asked} lookups of one lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_costs_its_claim_and_no_more() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let url = format!("etcd://{}?claim=2s", server.addr());
    let (store, dead) = (try_open(&url).await.unwrap(), try_open(&url).await.unwrap());
    let held = take(&store, &request("popular")).await;
    let gone = {
        let keeper = keeper(&dead);
        tokio::spawn(async move { keeper.lock("popular").acquire().await.map(drop) })
    };
    eventually("the waiter is queued", || async {
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == 1)
    })
    .await;
    // The store's thread is gone, as if the process had died: nothing releases the queue entry.
    gone.abort();
    drop(dead);
    give_back(&store, &held.key).await;
    let patient = with(request("popular"), |request| request.wait = Wait::For(Duration::from_secs(20)));
    let served = store.acquire(&patient).await;
    assert!(matches!(served, Ok(AcquireOutcome::Granted(_))), "{served:?}");
}
