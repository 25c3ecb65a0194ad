//! What is granted at once stands under a key that is used again and again, and is found there by its attempt.

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use common::{ctl, open};
use lockkeeper_core::{Acquired, Release, Renewal, Wait};
use lockkeeper_testkit::laws::{ask, give_back, is_free, name, stand_in_line, take, with};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// etcd keeps what was deleted in its index until it compacts: with a key of its own for each ask, a lock would get slower
/// with every time it is taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_taken_often_has_few_keys() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let mut keys = BTreeSet::new();
    for _ in 0..30 {
        let held = take(&store, &ask("often")).await;
        keys.insert(ctl(server.addr(), &["get", "--prefix", "lock/often/", "--keys-only"]));
        give_back(&store, &held.claim).await;
    }
    assert_eq!(keys.len(), 1, "{keys:?}");
}

/// Whoever asks again with the same attempt, or gives it back, may be another process, which knows nothing of the seat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_is_found_under_the_seat_of_another_process() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (first, second, third) =
        (open(server.addr()).await, open(server.addr()).await, open(server.addr()).await);
    let mine = ask("x");
    let held = take(&first, &mine).await;
    let waiter = stand_in_line(&first, &ask("x"), 1).await;
    for patience in [Wait::No, Wait::Forever] {
        let again = take(&second, &with(mine.clone(), |ask| ask.wait = patience)).await;
        assert_eq!(again.fence, held.fence);
        let seen = second.inspect(&name("x")).await.unwrap().unwrap();
        assert_eq!(
            (seen.held.len(), seen.waiting),
            (1, 1),
            "it does not stand in line behind itself: {seen:?}"
        );
        assert_eq!(second.renew(&[again]).await.unwrap(), [Renewal::Renewed]);
    }
    assert_eq!(third.release(&held.claim).await.unwrap(), Release::Released);
    let Ok(Acquired::Granted(next)) = waiter.await.unwrap() else { panic!("the next one has it") };
    assert!(next.fence > held.fence);
    assert_eq!(second.renew(&[held]).await.unwrap(), [Renewal::Lost]);
    give_back(&first, &next.claim).await;
    is_free(&third, "x").await;
}

/// An attempt that two processes have is given back by the one whose seat it is, and the seat is taken by another attempt. The release of the
/// other process must not end that one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seat_of_another_process_may_be_somebody_elses_by_now() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (first, second) = (open(server.addr()).await, open(server.addr()).await);
    let both = ask("x");
    let held = take(&first, &both).await;
    assert_eq!(take(&second, &both).await.fence, held.fence);
    give_back(&first, &both.claim).await;
    let next = take(&first, &ask("x")).await;
    assert_eq!(give_back(&second, &both.claim).await, Release::AlreadyGone);
    assert_eq!(first.renew(std::slice::from_ref(&next)).await.unwrap(), [Renewal::Renewed]);
    give_back(&first, &next.claim).await;
}

/// A release deletes the key without a look at it: it is the holder's own, or it is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_release_finds_its_key_gone_and_touches_nothing_else() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (first, second) = (open(server.addr()).await, open(server.addr()).await);
    let several = with(ask("a"), |ask| {
        ask.claim.names = lockkeeper_core::Names::new([name("a"), name("b")]).unwrap();
    });
    let held = take(&first, &several).await;
    ctl(server.addr(), &["del", "--prefix", "lock/a/"]);
    let next = take(&second, &ask("a")).await;
    assert_eq!(first.release(&held.claim).await.unwrap(), Release::Released, "the half that was left");
    assert_eq!(first.release(&held.claim).await.unwrap(), Release::AlreadyGone);
    is_free(&second, "b").await;

    let held = take(&first, &ask("c")).await;
    first.break_lock(&name("c"), "a test").await.unwrap();
    let other = take(&second, &ask("c")).await;
    assert_eq!(first.release(&held.claim).await.unwrap(), Release::AlreadyGone);

    // Held back, the key is no longer the holder's.
    let held = take(&first, &with(ask("d"), |ask| ask.lock_delay = Duration::from_secs(60))).await;
    first.break_lock(&name("d"), "a test").await.unwrap();
    assert_eq!(first.release(&held.claim).await.unwrap(), Release::AlreadyGone);
    let late = second.acquire(&with(ask("d"), |ask| ask.wait = Wait::No)).await.unwrap();
    assert!(matches!(late, Acquired::Busy(_)), "its release ended the delay: {late:?}");

    assert_eq!(second.renew(&[next, other]).await.unwrap(), [Renewal::Renewed, Renewal::Renewed]);
}
