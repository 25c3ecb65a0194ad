//! Who stands in line watches what is in the way, and nothing else: it hears of it long before it would look for itself.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::try_open;
use lockkeeper_core::{Ask, Mode, Store, Wait};
use lockkeeper_testkit::laws::{
    SHORT, ask, ask_all, eventually, give_back, granted, is_free, name, stand_in_line, take, with,
};
use lockkeeper_testkit::servers::{self, EtcdOptions, Server};

/// One that does not look for itself while a test lasts.
async fn patient(server: &Server) -> Arc<dyn Store> {
    try_open(&format!("etcd://{}?poll=600s&timeout=20s", server.addr())).await.unwrap()
}

/// Somebody shares the first of two names, and is not in the way; the other name is given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_shares_is_not_waited_for() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    for (mode, other) in [(Mode::Shared, Mode::Exclusive), (Mode::Permit(2), Mode::Permit(1))] {
        let shares = take(&store, &with(ask("a"), |ask| ask.mode = mode)).await;
        let blocks = take(&store, &with(ask("b"), |ask| ask.mode = other)).await;
        let waiter = stand_in_line(&store, &with(ask_all(&["a", "b"]), |ask| ask.mode = mode), 1).await;
        give_back(&store, &blocks.claim).await;
        let next = granted(waiter).await;
        give_back(&store, &next.claim).await;
        give_back(&store, &shares.claim).await;
        is_free(&store, "a").await;
    }
}

/// A hold has ended uncleanly, and the lock is held back. Whoever shared it later is not what is waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_delay_is_heard_of() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    let shares = || with(ask("a"), |ask| ask.mode = Mode::Shared);
    let ends = |ask: &mut Ask| (ask.ttl, ask.lock_delay) = (SHORT, Duration::from_secs(4));
    take(&store, &with(shares(), ends)).await;
    let later = take(&store, &shares()).await;
    eventually("the first has ended", || async {
        store.inspect(&name("a")).await.unwrap().unwrap().held.len() == 1
    })
    .await;
    let next = take(&store, &with(shares(), |ask| ask.wait = Wait::Forever)).await;
    give_back(&store, &next.claim).await;
    give_back(&store, &later.claim).await;
}
