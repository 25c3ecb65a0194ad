//! Lockkeeper and `etcdctl lock` exclude each other, and an administrator's etcdctl commands never cause a false
//! grant.

mod common;

use std::process::Stdio;
use std::time::Duration;

use common::{Counter, ctl, etcdctl, keeper, open};
use lockkeeper_core::{AcquireOutcome, Error, ReleaseOutcome, RenewOutcome, Wait};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, queue_reaches, refused, request, take, with,
};
use lockkeeper_testkit::servers::{self, EtcdOptions, TempDir};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_lock_and_lockkeeper_lose_no_count() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let dir = TempDir::new("foreign");
    let counter = std::sync::Arc::new(Counter::new(dir.path()));
    let (addr, rounds) = (server.addr(), 12);
    let foreign: Vec<_> = (0..3)
        .map(|_| {
            let script =
                format!("n=$(cat {0}); sleep 0.002; echo $((n + 1)) > {0}", counter.path().display());
            std::thread::spawn(move || {
                for _ in 0..rounds {
                    let lock = ["lock", "lock/shared", "--", "sh", "-c", &script];
                    let done = etcdctl(addr).args(lock).stdout(Stdio::null()).status().unwrap();
                    assert!(done.success());
                }
            })
        })
        .collect();
    let mut ours = Vec::new();
    for _ in 0..3 {
        let (keeper, counter) = (keeper(&open(addr).await), counter.clone());
        ours.push(tokio::spawn(async move {
            for _ in 0..rounds {
                let guard = keeper.lock("shared").ttl(Duration::from_secs(10)).acquire().await.unwrap();
                counter.add_one().await;
                guard.release().await.unwrap();
            }
        }));
    }
    for one in ours {
        one.await.unwrap();
    }
    tokio::task::spawn_blocking(|| foreign.into_iter().for_each(|one| one.join().unwrap())).await.unwrap();
    assert_eq!(counter.get(), 6 * rounds, "two clients held the lock at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_holder_is_seen_waited_for_and_broken() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let mut holder = etcdctl(server.addr())
        .args(["lock", "lock/x", "sleep", "20"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the foreign holder is seen", || async {
        store.inspect(&name("x")).await.unwrap().is_some_and(|view| view.held.len() == 1)
    })
    .await;
    let busy = refused(&store, &request("x")).await;
    assert_eq!(busy.held.len(), 1);
    let waiter = join_queue(&store, &request("x"), 1).await;
    let revoked = store.revoke(&name("x"), "it sleeps").await;
    assert!(
        matches!(revoked, Err(Error::Unsupported(_))),
        "a foreign holder cannot be notified: {revoked:?}"
    );
    let broken = store.break_lock(&name("x"), "it sleeps").await.unwrap();
    let next = granted(waiter).await;
    assert!(next.fence > broken);
    holder.kill().unwrap();
    holder.wait().unwrap();
    // A waiting foreign client takes the lock as soon as the first hold is released: a second hold beside it would
    // break exclusion.
    let me = lockkeeper_testkit::laws::owner();
    give_back(&store, &next.key).await;
    let mine = with(request("x"), |request| request.owner = Some(me));
    let held = take(&store, &mine).await;
    let mut rival =
        etcdctl(server.addr()).args(["lock", "lock/x", "true"]).stdout(Stdio::null()).spawn().unwrap();
    queue_reaches(&store, &name("x"), 1).await;
    let again = with(request("x"), |request| request.owner = Some(me));
    assert!(matches!(store.acquire(&again).await, Err(lockkeeper_core::Error::Deadlock(_))));
    give_back(&store, &held.key).await;
    assert!(tokio::task::spawn_blocking(move || rival.wait()).await.unwrap().unwrap().success());
    is_free(&store, "x").await;
}

/// Revokes all leases.
fn revoke_all(addr: std::net::SocketAddr) -> usize {
    let leases: Vec<String> = ctl(addr, &["lease", "list"]).lines().skip(1).map(str::to_owned).collect();
    leases.iter().for_each(|id| _ = ctl(addr, &["lease", "revoke", id]));
    leases.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_revoked_while_holding_loses_its_guards_and_no_others() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let lost = [take(&store, &request("a")).await, take(&store, &request("b")).await];
    let revoked = revoke_all(server.addr());
    assert_eq!(revoked, 1, "one lease for both");
    let kept = take(&other, &request("c")).await;
    let next = take(&other, &request("a")).await;
    assert!(next.fence > lost[0].fence);
    assert_eq!(store.renew(&lost).await.unwrap(), [RenewOutcome::Lost, RenewOutcome::Lost]);
    assert_eq!(store.release(&lost[0].key).await.unwrap(), ReleaseOutcome::AlreadyGone);
    assert_eq!(other.renew(&[next, kept]).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Renewed]);
    // The process that lost its lease continues with another one.
    take(&store, &request("b")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_revoked_while_waiting_grants_nothing() {
    // The bug that Jepsen found in etcd's own lock: a waiter whose lease had ended was granted the lock.
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let addr = server.addr();
    let stores = [open(addr).await, open(addr).await, open(addr).await];
    for _ in 0..5 {
        let held = take(&stores[0], &request("x")).await;
        let unlucky = join_queue(&stores[1], &request("x"), 1).await;
        let keys = ctl(addr, &["get", "--prefix", "--keys-only", "lock/x/"]);
        let is_waiting = |key: &&str| ctl(addr, &["get", "--print-value-only", key]).contains("waiting");
        let waiting = keys.split_whitespace().find(is_waiting).expect("a queue entry").to_owned();
        let lucky = join_queue(&stores[2], &request("x"), 2).await;
        let leases = ctl(addr, &["lease", "list"]);
        let its_lease = leases
            .lines()
            .skip(1)
            .find(|id| ctl(addr, &["lease", "timetolive", id, "--keys"]).contains(&waiting));
        ctl(addr, &["lease", "revoke", its_lease.expect("a lease with the entry attached")]);
        give_back(&stores[0], &held.key).await;
        // The first waiter's entry is gone: the store grants the lock to the next waiter, and the first one enqueues
        // behind it.
        let served = granted(lucky).await;
        assert!(!unlucky.is_finished(), "granted without a queue entry");
        queue_reaches(&stores[0], &name("x"), 1).await;
        give_back(&stores[2], &served.key).await;
        let last = granted(unlucky).await;
        assert!(last.fence > served.fence && served.fence > held.fence);
        give_back(&stores[1], &last.key).await;
        is_free(&stores[0], "x").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_deleted_and_no_fence_goes_back() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let stores = [open(server.addr()).await, open(server.addr()).await, open(server.addr()).await];
    let mut highest = None;
    for round in 0..5 {
        let held = take(&stores[round % 3], &request("x")).await;
        assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
        highest = Some(held.fence);
        let (store, patient) =
            (stores[(round + 1) % 3].clone(), with(request("x"), |request| request.wait = Wait::Forever));
        let waiter = tokio::spawn(async move { (store.acquire(&patient).await, patient) });
        queue_reaches(&stores[0], &name("x"), 1).await;
        ctl(server.addr(), &["del", "", "--prefix"]);
        assert_eq!(stores[round % 3].renew(&[held]).await.unwrap(), [RenewOutcome::Lost]);
        // The waiter is granted the lock at its next poll, if not before.
        let (served, patient) =
            tokio::time::timeout(Duration::from_secs(30), waiter).await.expect("it is served").unwrap();
        let Ok(AcquireOutcome::Granted(served)) = served else { panic!("{served:?}") };
        assert!(Some(served.fence) > highest, "{:?} after {highest:?}", served.fence);
        highest = Some(served.fence);
        give_back(&stores[0], &patient.key).await;
    }
    // An administrator lowers the base: a client that has seen a higher fence raises it again.
    let record = stores[0].write(&name("r"), b"x", lockkeeper_core::Expect::Any, None).await.unwrap();
    let lockkeeper_core::WriteOutcome::Written(version) = record else { panic!("{record:?}") };
    ctl(server.addr(), &["put", "lock//fence-base", "v1 7"]);
    let held = take(&stores[1], &request("x")).await;
    assert!(Some(held.fence) > highest, "{:?} after {highest:?}", held.fence);
    assert!(version.0 > 7);
}
