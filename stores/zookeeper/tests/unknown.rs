//! Requests with an unknown outcome. A proxy breaks the connection of one client at the first message, at the second,
//! and so on; another client checks what is left.

mod common;

use std::time::Duration;

use common::{admin, open, tree, try_open};
use futures_util::poll;
use lockkeeper_core::{AcquireOutcome, Error, Fence, ReleaseOutcome, RenewOutcome};
use lockkeeper_testkit::laws::{
    self, SHORT, eventually, give_back, is_free, refused, request, soon, take, with,
};
use lockkeeper_testkit::proxy::{At, Direction, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::scenarios::lost_messages::open_acquire_wait_release;
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};

async fn break_everywhere(server: &Server, kind: &str, fault: fn(At) -> Fault) {
    let other = open(server.addr()).await;
    let mut last: Option<Fence> = None;
    let points = every_point(400, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        let url = format!("zk://{}?timeout=500ms&poll=200ms&session=4s", proxy.addr());
        open_acquire_wait_release(async || try_open(&url).await, &other).await;
        let grant = take(&other, &request("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.key).await;
        injected.fired()
    })
    .await;
    // Only the fence base and empty queue nodes may be left.
    let admin = admin(server.addr()).await;
    eventually("nothing is left behind", || async {
        tree(&admin, "/lock")
            .await
            .iter()
            .all(|node| !node.contains("-lock-") && !node.contains("=hold-back"))
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 8, "the test has more than {points} requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    break_everywhere(&server, "answered, and cut before the reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    break_everywhere(&server, "reset before the request is passed on", At::reset).await;
}

/// A request got no reply, its retry could not be sent, and there was no third one. The store took the failure of the
/// retry as the outcome, and forgot the first request: the lock stayed held for as long as the process lived.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unsent_retry_does_not_hide_an_unknown_outcome() {
    // The session must not end during the test.
    let options = ZooKeeperOptions { extra: vec!["maxSessionTimeout=90000".into()], ..Default::default() };
    let Ok(server) = servers::zookeeper(options) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=3s&session=90s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    // The first request creates missing nodes; the next one is a single transaction.
    give_back(&store, &take(&store, &request("x")).await.key).await;
    let fault = proxy.inject(Fault::at_request(1).cut_before_reply());
    let lost = with(request("x"), |request| request.ttl = Duration::from_secs(5));
    let answer = store.acquire(&lost).await;
    assert!(matches!(answer, Err(Error::Unknown(_))) && fault.fired(), "{answer:?}");
    assert!(!other.inspect(&laws::name("x")).await.unwrap().unwrap().held.is_empty(), "it did happen");
    proxy.cut_all();
    eventually("a try is not sent", || async {
        match store.acquire(&lost).await {
            Err(Error::Unavailable(_)) => true,
            Err(Error::Unknown(_)) => false,
            answer => panic!("{answer:?}"),
        }
    })
    .await;
    proxy.heal();
    eventually("it is given back when its time is over", || async {
        matches!(other.acquire(&request("x")).await, Ok(AcquireOutcome::Granted(_)))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_was_released_meanwhile() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    laws::unknown::a_grant_that_was_released_meanwhile_is_not_reported(&store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_a_reply_leave_nothing() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    // The session must outlast the outage: its end would remove the nodes.
    let url = format!("zk://{}?timeout=500ms&poll=200ms&session=30s", proxy.addr());
    let store = try_open(&url).await.unwrap();
    let other = open(server.addr()).await;
    laws::unknown::renewals_without_a_reply_are_unknown(&proxy, &store).await;
    laws::unknown::an_unknown_request_leaves_nothing(&proxy, &store, &other).await;
    laws::unknown::a_release_that_was_given_up_leaves_nothing(&proxy, &store, &other).await;
}

/// The registry forgot a release that was dropped or that failed twice: the lock stayed held for as long as the
/// process lived.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_release_is_completed_later() {
    let options = ZooKeeperOptions { extra: vec!["maxSessionTimeout=90000".into()], ..Default::default() };
    let Ok(server) = servers::zookeeper(options) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    // The session must not end during the test: its end would remove the nodes.
    let store = try_open(&format!("zk://{}?timeout=3s&session=90s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    let held = take(&store, &request("dropped")).await;
    proxy.hold(Direction::Requests);
    let dropped = tokio::time::timeout(Duration::from_millis(50), store.release(&held.key)).await;
    assert!(dropped.is_err(), "the server cannot reply: {dropped:?}");
    proxy.cut_all();
    proxy.heal();
    is_free(&other, "dropped").await;

    let held = take(&store, &request("failed")).await;
    proxy.cut_all();
    for _ in 0..2 {
        let failed = soon("a release ends", store.release(&held.key)).await;
        assert!(matches!(failed, Err(Error::Unknown(_) | Error::Unavailable(_))), "{failed:?}");
    }
    proxy.heal();
    is_free(&other, "failed").await;
}

/// A release is dropped after the same attempt was granted again. The cleanup of the release ended the new grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_release_does_not_end_a_later_grant() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let (store, other) = (open(proxy.addr()).await, open(server.addr()).await);
    let asked = request("x");
    let held = take(&store, &asked).await;
    proxy.hold(Direction::Replies);
    let mut release = Box::pin(store.release(&held.key));
    assert!(poll!(release.as_mut()).is_pending(), "it waits for the server");
    proxy.heal();
    is_free(&other, "x").await;
    let again = take(&store, &asked).await;
    assert!(again.fence > held.fence);
    drop(release);
    // Long enough for a cleanup to remove the grant, if the store starts one.
    tokio::time::sleep(SHORT).await;
    refused(&other, &request("x")).await;
    assert_eq!(store.renew(std::slice::from_ref(&again)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&store, &again.key).await;
    is_free(&other, "x").await;
}

/// A release cancels a call of `acquire` that has not enqueued its request yet, and finds nothing. The call enqueues
/// the request afterwards, and its caller drops it. The lock stayed held for as long as the process lived.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_dropped_after_its_release_leaves_nothing() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let other = open(server.addr()).await;
    // The queue node exists.
    give_back(&other, &take(&other, &request("x")).await.key).await;
    // The first request of a session creates the request barrier before it enqueues anything.
    let store = open(proxy.addr()).await;
    let asked = request("x");
    let mut acquire = Box::pin(store.acquire(&asked));
    proxy.hold(Direction::Replies);
    assert!(poll!(acquire.as_mut()).is_pending(), "it creates the request barrier");
    proxy.heal();
    assert_eq!(give_back(&store, &asked.key).await, ReleaseOutcome::AlreadyGone);
    proxy.hold(Direction::Replies);
    assert!(poll!(acquire.as_mut()).is_pending(), "it enqueues the request");
    let name = laws::name("x");
    eventually("its node exists", || async { other.inspect(&name).await.unwrap().is_some() }).await;
    drop(acquire);
    proxy.heal();
    is_free(&other, "x").await;
}

/// A retry of a granted request gets the same grant. Its minimum hold began again with each retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_does_not_extend_the_minimum_hold() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let min_hold = Duration::from_secs(3);
    let asked = with(request("x"), |request| request.min_hold = min_hold);
    let held = take(&store, &asked).await;
    tokio::time::sleep(min_hold).await;
    assert_eq!(take(&store, &asked).await.fence, held.fence);
    give_back(&store, &held.key).await;
    let next = take(&other, &request("x")).await;
    give_back(&other, &next.key).await;
}

/// The registry removes the nodes of a dropped release while another release of the attempt removes them too. The
/// attempt is then granted again. The registry looked again, found the new grant, and ended it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleanup_does_not_end_a_later_grant() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store = open(server.addr()).await;
    let asked = request("x");
    let mut dropped = 0;
    for n in 0..300 {
        let held = take(&store, &asked).await;
        let mut release = Box::pin(store.release(&held.key));
        // The reply may be there already if the system suspended this thread in the meantime.
        dropped += u32::from(poll!(release.as_mut()).is_pending());
        drop(release);
        // The cleanup begins at once, and the second release at various moments of it.
        let begin = std::time::Instant::now();
        while begin.elapsed() < Duration::from_micros(20 * (n % 50)) {
            tokio::task::yield_now().await;
        }
        give_back(&store, &held.key).await;
        let again = take(&store, &asked).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let renewed = store.renew(std::slice::from_ref(&again)).await.unwrap();
        assert_eq!(renewed, [RenewOutcome::Renewed], "in round {n}");
        give_back(&store, &again.key).await;
    }
    assert!(dropped >= 150, "nothing is shown: {dropped} of 300 releases were dropped before their reply");
}

/// A retry of an attempt whose grant was broken waits in the queue. If that call was dropped, the next retry got the
/// old fence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_does_not_resume_a_broken_grant() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let asked = request("x");
    take(&store, &asked).await;
    other.break_lock(&laws::name("x"), "to see what happens").await.unwrap();
    let holds = take(&other, &request("x")).await;
    let waits = laws::join_queue(&store, &asked, 1).await;
    waits.abort();
    _ = waits.await;
    laws::refused(&store, &asked).await;
    give_back(&other, &holds.key).await;
    let next = take(&store, &asked).await;
    assert!(next.fence > holds.fence);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_during_an_outage() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=2s&poll=200ms&session=30s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    laws::unknown::a_wait_that_ends_during_an_outage_leaves_nothing(&proxy, &store, &other).await;
}

/// A server to which a session reconnects closes the session's old connection, and ignores what still arrives on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=2s&poll=200ms&session=30s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    // The nodes that both requests need exist.
    give_back(&store, &take(&store, &request("first")).await.key).await;
    laws::unknown::a_request_that_arrives_after_its_release_takes_nothing(&proxy, &store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_noticed_while_callers_come_and_go() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let open = async |addr| try_open(&format!("zk://{addr}?timeout=1s&session=30s")).await.unwrap();
    laws::silence::a_silent_server_is_noticed_while_callers_come_and_go(
        server.addr(),
        Framing::ZooKeeper,
        open,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let open = async |addr| try_open(&format!("zk://{addr}?timeout=2s&poll=2s&session=4s")).await.unwrap();
    laws::wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::ZooKeeper, open).await;
}
