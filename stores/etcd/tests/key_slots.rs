//! Key slots: a grant of a free lock uses a key that the process reuses, and other processes find it by its attempt.

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use common::{ctl, open};
use lockkeeper_core::{AcquireOutcome, ReleaseOutcome, RenewOutcome, Wait};
use lockkeeper_testkit::laws::{give_back, is_free, join_queue, name, request, take, with};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// etcd keeps deleted keys in its index until it compacts: with a new key for each request, a lock would get slower
/// with every acquire.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_taken_often_has_few_keys() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let mut keys = BTreeSet::new();
    for _ in 0..30 {
        let held = take(&store, &request("often")).await;
        keys.insert(ctl(server.addr(), &["get", "--prefix", "lock/often/", "--keys-only"]));
        give_back(&store, &held.key).await;
    }
    assert_eq!(keys.len(), 1, "{keys:?}");
}

/// A process that repeats an attempt, or releases it, may be another one, which does not know the slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_is_found_in_the_slot_of_another_process() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (first, second, third) =
        (open(server.addr()).await, open(server.addr()).await, open(server.addr()).await);
    let mine = request("x");
    let held = take(&first, &mine).await;
    let waiter = join_queue(&first, &request("x"), 1).await;
    for patience in [Wait::No, Wait::Forever] {
        let again = take(&second, &with(mine.clone(), |request| request.wait = patience)).await;
        assert_eq!(again.fence, held.fence);
        let seen = second.inspect(&name("x")).await.unwrap().unwrap();
        assert_eq!(
            (seen.held.len(), seen.waiting),
            (1, 1),
            "the attempt must not wait behind itself: {seen:?}"
        );
        assert_eq!(second.renew(&[again]).await.unwrap(), [RenewOutcome::Renewed]);
    }
    assert_eq!(third.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    let Ok(AcquireOutcome::Granted(next)) = waiter.await.unwrap() else { panic!("the next one has it") };
    assert!(next.fence > held.fence);
    assert_eq!(second.renew(&[held]).await.unwrap(), [RenewOutcome::Lost]);
    give_back(&first, &next.key).await;
    is_free(&third, "x").await;
}

/// Two processes have one attempt. The one that owns the slot releases it, and another attempt takes the slot. The
/// release of the other process must not end that one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_of_another_process_may_belong_to_another_attempt() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (first, second) = (open(server.addr()).await, open(server.addr()).await);
    let both = request("x");
    let held = take(&first, &both).await;
    assert_eq!(take(&second, &both).await.fence, held.fence);
    give_back(&first, &both.key).await;
    let next = take(&first, &request("x")).await;
    assert_eq!(give_back(&second, &both.key).await, ReleaseOutcome::AlreadyGone);
    assert_eq!(first.renew(std::slice::from_ref(&next)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&first, &next.key).await;
}

/// A release deletes the key without comparing it: the key is the holder's own, or it is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_release_finds_its_key_gone_and_touches_nothing_else() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (first, second) = (open(server.addr()).await, open(server.addr()).await);
    let several = with(request("a"), |request| {
        request.key.names = lockkeeper_core::Names::new([name("a"), name("b")]).unwrap();
    });
    let held = take(&first, &several).await;
    ctl(server.addr(), &["del", "--prefix", "lock/a/"]);
    let next = take(&second, &request("a")).await;
    assert_eq!(first.release(&held.key).await.unwrap(), ReleaseOutcome::Released, "the remaining half");
    assert_eq!(first.release(&held.key).await.unwrap(), ReleaseOutcome::AlreadyGone);
    is_free(&second, "b").await;

    let held = take(&first, &request("c")).await;
    first.break_lock(&name("c"), "a test").await.unwrap();
    let other = take(&second, &request("c")).await;
    assert_eq!(first.release(&held.key).await.unwrap(), ReleaseOutcome::AlreadyGone);

    // During a lock-delay the key is no longer the holder's.
    let held =
        take(&first, &with(request("d"), |request| request.lock_delay = Duration::from_secs(60))).await;
    first.break_lock(&name("d"), "a test").await.unwrap();
    assert_eq!(first.release(&held.key).await.unwrap(), ReleaseOutcome::AlreadyGone);
    let late = second.acquire(&with(request("d"), |request| request.wait = Wait::No)).await.unwrap();
    assert!(matches!(late, AcquireOutcome::Busy(_)), "its release ended the delay: {late:?}");

    assert_eq!(second.renew(&[next, other]).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Renewed]);
}
