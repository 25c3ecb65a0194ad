//! Revoked and broken locks: the holders, the waiters, and grants of several names.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open, tree};
use futures_util::StreamExt;
use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Error, EventKind, Mode, ReleaseOutcome, RenewOutcome, Store, Wait};
use lockkeeper_testkit::laws::{
    give_back, granted, is_free, join_queue, name, owner, request, request_all, soon, take, with,
};
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};
use zookeeper_client::{Acls, CreateMode};

fn server() -> Option<Server> {
    servers::zookeeper(ZooKeeperOptions::default()).ok()
}

async fn holders(store: &Arc<dyn Store>, text: &str) -> usize {
    store.inspect(&name(text)).await.unwrap().map_or(0, |view| view.held.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_of_several_names_is_revoked_as_a_whole() {
    let Some(server) = server() else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let mut events = other.watch("").await.unwrap();
    let held = take(&store, &request_all(&["a", "b", "c"])).await;
    let fence = other.revoke(&name("b"), "the host is drained").await.unwrap();
    assert!(fence > held.fence);
    for text in ["a", "b", "c"] {
        let view = other.inspect(&name(text)).await.unwrap().unwrap();
        assert_eq!(view.held[0].revoked.as_deref(), Some("the host is drained"), "{text}");
        assert_eq!(view.held[0].fence, held.fence, "its fence is what it was");
    }
    let told = store.renew(std::slice::from_ref(&held)).await.unwrap();
    assert_eq!(told, [RenewOutcome::Revoked("the host is drained".into())]);
    // The last reason counts.
    other.revoke(&name("c"), "the host is gone").await.unwrap();
    let told = store.renew(std::slice::from_ref(&held)).await.unwrap();
    assert_eq!(told, [RenewOutcome::Revoked("the host is gone".into())]);
    assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
    for text in ["a", "b", "c"] {
        is_free(&other, text).await;
    }
    let mut names = Vec::new();
    while names.len() < 3 {
        let event = soon("an event comes", events.next()).await.unwrap().unwrap();
        if let EventKind::Revoked { reason, .. } = &event.kind {
            assert_eq!(reason, "the host is drained");
            names.push(event.name.to_string());
        }
    }
    names.sort();
    assert_eq!(names, ["a", "b", "c"]);
}

/// A retry of the same attempt restarts its lease. With that, a revoked holder could keep the lock for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_does_not_extend_a_revoked_lease() {
    let Some(server) = server() else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let short = with(request("x"), |request| request.ttl = Duration::from_secs(2));
    let held = take(&store, &short).await;
    let waiter = join_queue(&other, &request("x"), 1).await;
    other.revoke(&name("x"), "the host is drained").await.unwrap();
    let asks_again = async {
        loop {
            match store.acquire(&short).await {
                Err(Error::Lost(why)) => assert!(why.contains("the host is drained"), "{why}"),
                // Its lease is over, and it is behind the waiter.
                Ok(AcquireOutcome::Busy(_)) => break,
                answer => panic!("{answer:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (next, ()) = soon("the lease is over", async { tokio::join!(granted(waiter), asks_again) }).await;
    assert!(next.fence > held.fence);
}

/// A revocation frees a lock that is only held back. The first waiter looks like a holder, and its node is rewritten
/// too: that revocation is older than its grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revocation_ends_a_hold_back_and_admits_the_waiter() {
    let Some(server) = server() else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let delayed = with(request("x"), |request| request.lock_delay = Duration::from_secs(600));
    let held = take(&store, &delayed).await;
    other.break_lock(&name("x"), "the holder hangs").await.unwrap();
    let waiting = {
        let other = other.clone();
        tokio::spawn(async move {
            other.acquire(&with(request("x"), |request| request.wait = Wait::Forever)).await
        })
    };
    // The request is in the queue when its node is beside the hold-back node.
    let admin = admin(server.addr()).await;
    lockkeeper_testkit::laws::eventually("the request is in the queue", || async {
        tree(&admin, "/lock/x").await.iter().any(|node| node.contains("-lock-"))
    })
    .await;
    let fence = other.revoke(&name("x"), "no need to wait").await.unwrap();
    let next = granted(waiting).await;
    assert!(next.fence > fence && fence > held.fence);
    assert_eq!(other.renew(std::slice::from_ref(&next)).await.unwrap(), [RenewOutcome::Renewed]);
    assert_eq!(other.inspect(&name("x")).await.unwrap().unwrap().held[0].revoked, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_holder_cannot_be_revoked() {
    let Some(server) = server() else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    give_back(&store, &take(&store, &request("x")).await.key).await;
    let mode = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let node = "/lock/x/_c_0f4c2f3e-3a4b-4b57-9f4e-1d2c3b4a5f60-lock-";
    admin.create(node, b"10.0.0.7", &mode).await.unwrap();
    let refused = store.revoke(&name("x"), "the host is drained").await;
    assert!(matches!(&refused, Err(Error::Unsupported(why)) if why.contains("--now")), "{refused:?}");
    assert_eq!(holders(&store, "x").await, 1);
    store.break_lock(&name("x"), "the host is drained").await.unwrap();
    take(&store, &request("x")).await;
}

/// Transactions were split at any operation: two names of a grant were freed, and the third stayed held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_grants_of_several_names_are_broken_or_revoked_whole() {
    let Some(server) = server() else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let shared = || {
        with(request_all(&["a", "b", "c"]), |request| {
            (request.mode, request.wait) = (Mode::Shared, Wait::Forever)
        })
    };
    let requests: Vec<_> = (0..70).map(|_| shared()).collect();
    let held = join_all(requests.iter().map(|request| take(&store, request))).await;
    other.revoke(&name("a"), "the host is drained").await.unwrap();
    for told in store.renew(&held).await.unwrap() {
        assert_eq!(told, RenewOutcome::Revoked("the host is drained".into()));
    }
    other.break_lock(&name("a"), "they hang").await.unwrap();
    for text in ["a", "b", "c"] {
        assert_eq!(holders(&other, text).await, 0, "{text} is still held");
    }
    assert!(store.renew(&held).await.unwrap().iter().all(|told| *told == RenewOutcome::Lost));
}

/// The owner's second hold is behind a waiter. The break took that waiter for a holder, and deleted its entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_break_keeps_the_entry_of_the_first_waiter() {
    let Some(server) = server() else { return };
    let (store, other, admin) =
        (open(server.addr()).await, open(server.addr()).await, admin(server.addr()).await);
    let me = owner();
    let mine = || with(request("x"), |request| request.owner = Some(me));
    let first = take(&store, &mine()).await;
    let waiters = [join_queue(&other, &request("x"), 1).await, join_queue(&other, &request("x"), 2).await];
    let again = take(&store, &mine()).await;
    give_back(&store, &first.key).await;
    let entries = || async {
        let nodes = tree(&admin, "/lock/x").await;
        nodes.into_iter().filter(|node| node.contains("lock-") && !node.contains("own-")).collect::<Vec<_>>()
    };
    let before = entries().await;
    assert_eq!((before.len(), holders(&store, "x").await), (2, 1));
    store.break_lock(&name("x"), "the holder hangs").await.unwrap();
    let [one, two] = waiters;
    let next = granted(one).await;
    assert!(next.fence > again.fence && !two.is_finished());
    let after = entries().await;
    assert!(after.iter().all(|node| before.contains(node)), "{before:?} became {after:?}");
}
