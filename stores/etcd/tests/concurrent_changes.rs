//! Changes by another client between a read of the queue and the write that depends on it.

mod common;

use std::pin::pin;
use std::task::Poll;

use common::{ctl, open, try_open, until_reply};
use futures_util::poll;
use lockkeeper_core::{AcquireOutcome, Error, Wait, limits};
use lockkeeper_testkit::laws::{
    SHORT, eventually, give_back, granted, is_free, join_queue, name, owner, refused, request, request_all,
    soon, take, with,
};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// An owner is about to re-enter a hold that an operator breaks at that moment. With its old fence the re-entry would
/// look older than the break.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_hold_is_not_re_entered() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let owner = owner();
    let requests = || with(request("x"), |request| request.owner = Some(owner));
    let held = take(&store, &requests()).await;
    // The store now knows that the lock is contended: the next request begins with a read.
    refused(&store, &request("x")).await;
    let again = requests();
    let mut asked = pin!(store.acquire(&again));
    until_reply(asked.as_mut()).await;
    let broken = other.break_lock(&name("x"), "a test").await.unwrap();
    match soon("the call ends", asked).await {
        Ok(AcquireOutcome::Granted(next)) => {
            assert!(next.fence > broken, "broken with {broken}, and entered again with {}", next.fence);
        }
        other => panic!("the lock was broken and must be free: {other:?}"),
    }
    assert!(held.fence < broken);
    give_back(&store, &again.key).await;
    is_free(&other, "x").await;
}

/// The fence base is malformed, and the store finds out only after the request is queued.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_fails_after_enqueuing_leaves_the_queue() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let elsewhere = take(&other, &request("elsewhere")).await;
    // Another queue entry of the same process keeps the lease of the entries alive.
    let waiter = join_queue(&store, &request("elsewhere"), 1).await;
    let held = take(&other, &request("x")).await;
    ctl(server.addr(), &["put", "lock//fence-base", "nonsense"]);
    let outcome = store
        .acquire(&with(request("x"), |request| (request.ttl, request.wait) = (SHORT, Wait::Forever)))
        .await;
    assert!(matches!(outcome, Err(Error::Invalid(_))), "{outcome:?}");
    eventually("only the holder is there", || async {
        ctl(server.addr(), &["get", "--prefix", "lock/x/", "--keys-only"]).split_whitespace().count() == 1
    })
    .await;
    ctl(server.addr(), &["del", "lock//fence-base"]);
    give_back(&other, &held.key).await;
    give_back(&other, &elsewhere.key).await;
    let served = granted(waiter).await;
    give_back(&store, &served.key).await;
}

/// Re-enters as many names as a request may have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_names_are_re_entered() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let texts: Vec<String> = (0..limits::NAMES).map(|i| format!("x/{i}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let owner = owner();
    let requests = || with(request_all(&texts), |request| request.owner = Some(owner));
    let (first, second) = (take(&store, &requests()).await, take(&store, &requests()).await);
    assert_eq!(first.fence, second.fence);
    give_back(&store, &first.key).await;
    give_back(&store, &second.key).await;
}

/// Another client writes to the queue between every read and write. A request that always read again never ended, not
/// even with its wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_though_the_queue_changes_at_every_read() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = try_open(&format!("etcd://{}?timeout=3s", server.addr())).await.unwrap();
    let other = open(server.addr()).await;
    let held = take(&other, &request("x")).await;
    let patient = with(request("x"), |request| request.wait = Wait::For(SHORT));
    let mut asked = pin!(store.acquire(&patient));
    let write = || _ = ctl(server.addr(), &["put", "lock/x/behind", "foreign"]);
    let outcome = soon("its wait ends", async {
        let mut released = false;
        loop {
            if let Poll::Ready(outcome) = poll!(asked.as_mut()) {
                break outcome;
            }
            let view = other.inspect(&name("x")).await.unwrap().unwrap();
            if view.waiting > 0 || released {
                write();
            }
            if view.waiting > 0 && !released {
                give_back(&other, &held.key).await;
                released = true;
            }
        }
    })
    .await;
    ctl(server.addr(), &["del", "lock/x/behind"]);
    match outcome {
        Ok(AcquireOutcome::Busy(_)) => {}
        // On a busy machine a write may come before the read that it was to follow.
        Ok(AcquireOutcome::Granted(grant)) => _ = give_back(&other, &grant.key).await,
        other => panic!("{other:?}"),
    }
    is_free(&other, "x").await;
}
