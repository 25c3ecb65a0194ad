//! A waiter watches only the entry that blocks it, and notices its end long before its next poll.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::try_open;
use lockkeeper_core::{LockRequest, Mode, Store, Wait};
use lockkeeper_testkit::laws::{
    SHORT, eventually, give_back, granted, is_free, join_queue, name, request, request_all, take, with,
};
use lockkeeper_testkit::servers::{self, EtcdOptions, Server};

/// A store that does not poll while a test runs.
async fn patient(server: &Server) -> Arc<dyn Store> {
    try_open(&format!("etcd://{}?poll=600s&timeout=20s", server.addr())).await.unwrap()
}

/// A holder shares the first of two names, and does not block; the other name is released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_does_not_wait_for_sharers() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    for (mode, other) in [(Mode::Shared, Mode::Exclusive), (Mode::Permit(2), Mode::Permit(1))] {
        let shares = take(&store, &with(request("a"), |request| request.mode = mode)).await;
        let blocks = take(&store, &with(request("b"), |request| request.mode = other)).await;
        let waiter =
            join_queue(&store, &with(request_all(&["a", "b"]), |request| request.mode = mode), 1).await;
        give_back(&store, &blocks.key).await;
        let next = granted(waiter).await;
        give_back(&store, &next.key).await;
        give_back(&store, &shares.key).await;
        is_free(&store, "a").await;
    }
}

/// A hold has ended without a release, and its lock-delay runs. A later shared holder is not the one to wait for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_notices_the_end_of_a_lock_delay() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = patient(&server).await;
    let shares = || with(request("a"), |request| request.mode = Mode::Shared);
    let ends =
        |request: &mut LockRequest| (request.ttl, request.lock_delay) = (SHORT, Duration::from_secs(4));
    take(&store, &with(shares(), ends)).await;
    let later = take(&store, &shares()).await;
    eventually("the first has ended", || async {
        store.inspect(&name("a")).await.unwrap().unwrap().held.len() == 1
    })
    .await;
    let next = take(&store, &with(shares(), |request| request.wait = Wait::Forever)).await;
    give_back(&store, &next.key).await;
    give_back(&store, &later.key).await;
}
