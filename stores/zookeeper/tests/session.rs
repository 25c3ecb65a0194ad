//! Sessions that end: an administrator closes them, or no server is reachable. There is never a false grant, losses
//! are reported, and the process goes on with another session.

mod common;

use std::time::Duration;

use common::{admin, keeper, open, tree, try_open};
use lockkeeper_core::{AcquireOutcome, Error, ReleaseOutcome, RenewOutcome, Wait};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, queue_reaches, refused, request, soon, take,
    with,
};
use lockkeeper_testkit::proxy::{Direction, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};
use zookeeper_client::Client;

/// Ends the session that owns a node.
async fn end_session_at(admin: &Client, server: &Server, node: &str) {
    let (_, stat) = admin.get_data(node).await.unwrap();
    let (addr, session) = (server.addr(), stat.ephemeral_owner);
    // The client may resume the session before the close arrives: then it is closed again.
    eventually("its nodes are gone", || async {
        tokio::task::block_in_place(|| common::close_session(addr, session));
        admin.check_stat(node).await.unwrap().is_none()
    })
    .await;
}

/// The entries in the queue of `x`, in order.
async fn entries(admin: &Client) -> Vec<String> {
    let mut entries: Vec<String> =
        tree(admin, "/lock/x").await.into_iter().filter(|node| node.contains("lock-")).collect();
    entries.sort_by_key(|node| node.rsplit('-').next().unwrap().parse::<u64>().unwrap());
    entries
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_ends_while_holding_loses_its_guards_and_no_others() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, other, admin) =
        (open(server.addr()).await, open(server.addr()).await, admin(server.addr()).await);
    // Within the session, and long enough for a busy machine to end the session before the leases end.
    let short = |text| with(request(text), |request| request.ttl = Duration::from_secs(10));
    let lost = [take(&store, &short("x")).await, take(&store, &short("y")).await];
    let kept = take(&other, &request("z")).await;
    end_session_at(&admin, &server, &entries(&admin).await[0]).await;
    let next = take(&other, &request("x")).await;
    assert!(next.fence > lost[0].fence);
    // The outcome of a renewal during the end of the session is unknown, so it is retried.
    eventually("the loss is reported", || async {
        match store.renew(&lost).await {
            Err(Error::Unknown(_) | Error::Unavailable(_)) => false,
            told => {
                assert_eq!(told.unwrap(), [RenewOutcome::Lost, RenewOutcome::Lost]);
                true
            }
        }
    })
    .await;
    assert_eq!(store.release(&lost[0].key).await.unwrap(), ReleaseOutcome::AlreadyGone);
    assert_eq!(other.renew(&[next, kept]).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Renewed]);
    // The process that lost its session goes on with another one.
    take(&store, &request("y")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_ends_while_waiting_grants_nothing() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (addr, admin) = (server.addr(), admin(server.addr()).await);
    let stores = [open(addr).await, open(addr).await, open(addr).await];
    for _ in 0..3 {
        let held = take(&stores[0], &request("x")).await;
        let first = join_queue(&stores[1], &request("x"), 1).await;
        let place = entries(&admin).await[1].clone();
        let second = join_queue(&stores[2], &request("x"), 2).await;
        end_session_at(&admin, &server, &place).await;
        // The first waiter has lost its entry: it enqueues again behind the other, in another session.
        eventually("it is in the queue again", || async { entries(&admin).await.len() == 3 }).await;
        give_back(&stores[0], &held.key).await;
        let served = granted(second).await;
        assert!(!first.is_finished(), "granted without a queue entry");
        queue_reaches(&stores[0], &name("x"), 1).await;
        give_back(&stores[2], &served.key).await;
        let last = granted(first).await;
        assert!(last.fence > served.fence && served.fence > held.fence);
        give_back(&stores[1], &last.key).await;
        is_free(&stores[0], "x").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_that_is_cut_off_is_lost_before_the_next_grant() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let cut_off = try_open(&format!("zk://{}?timeout=500ms&session=2s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    // A guard trusts a ttl beyond the session after its first renewal: the hold-back node keeps what the session does
    // not.
    for (ttl, renewed) in [(1, false), (5, false), (5, true)] {
        let keeper = keeper(&cut_off);
        // On a busy machine a call may exceed its 500 ms, or the session of 2 s may end: neither shows anything, so the test acquires again.
        let undisturbed = async {
            loop {
                let guard = match keeper.lock("x").ttl(Duration::from_secs(ttl)).acquire().await {
                    Ok(guard) => guard,
                    Err(Error::Unavailable(_) | Error::Unknown(_)) => continue,
                    Err(error) => panic!("{error}"),
                };
                let first = guard.deadline();
                if renewed {
                    eventually("it is renewed", || async { guard.deadline() > first || !guard.is_held() })
                        .await;
                }
                if guard.is_held() {
                    assert!(!renewed || guard.deadline().since(first) > Duration::from_secs(3));
                    break guard;
                }
            }
        };
        let guard = soon("a guard that a busy machine leaves alone", undisturbed).await;
        proxy.hold(Direction::Requests);
        let waiter = {
            let other = other.clone();
            tokio::spawn(async move {
                other.acquire(&with(request("x"), |request| request.wait = Wait::Forever)).await
            })
        };
        let next = granted(waiter).await;
        assert!(!guard.is_held(), "two clients hold the lock, with a ttl of {ttl} s");
        soon("the loss is reported", guard.lost()).await;
        assert!(next.fence > guard.fence());
        give_back(&other, &next.key).await;
        proxy.cut(Pick::Any);
        proxy.heal();
        drop(guard);
        soon("what is left is released", keeper.settle()).await;
        eventually("it goes on by itself", || async {
            match cut_off.acquire(&request("x")).await {
                Ok(AcquireOutcome::Granted(grant)) => cut_off.release(&grant.key).await.is_ok(),
                _ => false,
            }
        })
        .await;
        is_free(&other, "x").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_delay_follows_the_death_of_a_process() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let dead = open(server.addr()).await;
    let careful = |text, delay| {
        with(request(text), |request| {
            (request.ttl, request.lock_delay) = (Duration::from_secs(1), Duration::from_millis(delay));
        })
    };
    take(&dead, &careful("x", 600_000)).await;
    take(&dead, &careful("y", 1)).await;
    end_session_at(&admin, &server, &entries(&admin).await[0]).await;
    refused(&store, &request("x")).await;
    let view = store.inspect(&name("x")).await.unwrap().unwrap();
    assert!(view.held.is_empty() && view.delayed_ms.is_some(), "{view:?}");
    let patient = with(request("y"), |request| request.wait = Wait::Forever);
    assert!(matches!(
        soon("a short delay ends", store.acquire(&patient)).await,
        Ok(AcquireOutcome::Granted(_))
    ));
}

/// Whether a dropped store closed its session was left to chance. A closed session freed a lock whose lease was still
/// valid. Now the session is never closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_store_keeps_its_locks_until_their_leases_end() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let other = open(server.addr()).await;
    for _ in 0..6 {
        let store = try_open(&format!("zk://{}?session=2s", server.addr())).await.unwrap();
        let held = take(&store, &request("x")).await;
        drop(store);
        let patient = with(request("x"), |request| request.wait = Wait::Forever);
        let next = soon("its session ends", other.acquire(&patient)).await;
        assert!(SystemClock.now() >= held.sent_at + held.lease, "free before its lease is over");
        let Ok(AcquireOutcome::Granted(next)) = next else { panic!("{next:?}") };
        assert!(next.fence > held.fence);
        give_back(&other, &next.key).await;
    }
}
