//! Restarts and outages of a server: what they cost waiters and callers.

mod common;

use std::time::Duration;

use common::{keeper, try_open};
use futures_util::future::join_all;
use lockkeeper_core::{Error, RenewOutcome};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{eventually, name, queue_reaches, request, soon, take, with};
use lockkeeper_testkit::proxy::{Direction, Fault, Framing, Proxy};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

/// The time that a busy machine may add to the declared time: the server, the client and the builds beside them share its cores.
const BUSY_MACHINE: Duration = Duration::from_secs(20);

/// A server restarts all session timeouts when it starts. The declared bound counts from the last start, and the
/// profile says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_holder_is_gone_within_the_bound_after_the_last_restart() {
    let extra = vec!["maxSessionTimeout=90000".into()];
    let Ok(mut server) = servers::zookeeper(ZooKeeperOptions { extra, ..Default::default() }) else { return };
    let other = try_open(&format!("zk://{}?session=90s", server.addr())).await.unwrap();
    let dead = try_open(&format!("zk://{}?session=4s", server.addr())).await.unwrap();
    let profile = dead.profile();
    assert!(
        profile.findings.iter().any(|finding| finding.text.contains("every restart")),
        "{:?}",
        profile.findings
    );
    assert!(profile.wake >= Duration::from_secs(10 + 4 + 2), "poll, session and a tick: {:?}", profile.wake);
    take(&dead, &with(request("x"), |request| request.ttl = Duration::from_secs(1))).await;
    drop(dead);
    let keeper = keeper(&other);
    let waiter = tokio::spawn(async move { keeper.lock("x").ttl(Duration::from_secs(60)).acquire().await });
    queue_reaches(&other, &name("x"), 1).await;
    for _ in 0..3 {
        tokio::task::block_in_place(|| server.restart());
    }
    let back_at = SystemClock.now();
    let next = soon("the waiter is granted", waiter).await.unwrap().unwrap();
    let took = SystemClock.now().since(back_at);
    drop(next);
    assert!(
        took <= profile.wake + BUSY_MACHINE,
        "{took:?} after the last restart, and {:?} are declared",
        profile.wake
    );
}

/// Each caller tried to connect after the previous one had failed: the last of fifteen got its error after fifteen
/// timeouts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_callers_share_one_failed_connect() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=3s&session=4s", proxy.addr())).await.unwrap();
    proxy.hold(Direction::Requests);
    eventually("its session is over, and it connects anew", || async {
        match store.acquire(&request("x")).await {
            Err(Error::Unavailable(why)) => why.contains("no ZooKeeper that serves"),
            Err(Error::Unknown(_)) => false,
            answer => panic!("{answer:?}"),
        }
    })
    .await;
    let asked_at = SystemClock.now();
    let requests: Vec<_> = (0..15).map(|n| request(&format!("{n}"))).collect();
    for answer in join_all(requests.iter().map(|request| store.acquire(request))).await {
        assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
    }
    let took = SystemClock.now().since(asked_at);
    assert!(took < Duration::from_secs(20), "one after the other: {took:?}");
    proxy.cut_all();
    proxy.heal();
    eventually("it is served again", || async { store.acquire(&request("x")).await.is_ok() }).await;
}

/// Renewals are sent in several transactions. If one of them gets no reply, the others are still reported as renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_without_a_reply_is_unknown() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=3s&session=30s", proxy.addr())).await.unwrap();
    let requests: Vec<_> = (0..150).map(|n| request(&format!("n{n}"))).collect();
    let held = join_all(requests.iter().map(|request| take(&store, request))).await;
    // The first transaction renews 128 of them.
    let fault = proxy.inject(Fault::at_request(2).cut_before_reply());
    let told = store.renew(&held).await.unwrap();
    assert!(fault.fired());
    let count = |what: RenewOutcome| told.iter().filter(|told| **told == what).count();
    assert_eq!((count(RenewOutcome::Renewed), count(RenewOutcome::Unknown)), (128, 22), "{told:?}");
    eventually("all of them are renewed in the end", || async {
        store.renew(&held).await.is_ok_and(|told| told.iter().all(|told| *told == RenewOutcome::Renewed))
    })
    .await;
}
