//! Requests with an unknown outcome. One client talks through a proxy that breaks its connection at the first message,
//! the second, and so on; another client checks what that leaves behind.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{ctl, handled, open, try_open, until_reply};
use lockkeeper_core::{AcquireOutcome, Error, Fence, ReleaseOutcome, RenewOutcome, Store, Wait};
use lockkeeper_testkit::laws::{self, eventually, give_back, is_free, refused, request, soon, take, with};
use lockkeeper_testkit::proxy::{At, Direction, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::scenarios::lost_messages::open_acquire_wait_release;
use lockkeeper_testkit::servers::{self, EtcdOptions, Server};

const TTL: Duration = Duration::from_secs(20);

async fn break_everywhere(server: &Server, kind: &str, fault: fn(At) -> Fault) {
    let other = open(server.addr()).await;
    let mut last: Option<Fence> = None;
    let points = every_point(400, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::Http2);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        let url = format!("etcd://{}?timeout=500ms&poll=200ms", proxy.addr());
        open_acquire_wait_release(async || try_open(&url).await, &other).await;
        let grant = take(&other, &request("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.key).await;
        injected.fired()
    })
    .await;
    // Only the fence base and the last change cause remain.
    eventually("nothing is left behind", || async {
        let keys = ctl(server.addr(), &["get", "", "--prefix", "--keys-only"]);
        keys.split_whitespace().all(|key| ["lock//fence-base", "lock//change-cause"].contains(&key))
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 8, "the story has more than {points} requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    break_everywhere(&server, "applied, and cut before the reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    break_everywhere(&server, "reset before the request is passed on", At::reset).await;
}

/// A client with a timeout that is long enough for a busy machine, and for the replies that the tests hold back or
/// cut.
async fn unlucky(proxy: &Proxy) -> Arc<dyn Store> {
    try_open(&format!("etcd://{}?timeout=2s&poll=200ms", proxy.addr())).await.expect("it opens")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_a_reply_leaves_nothing() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let store = unlucky(&proxy).await;
    laws::unknown::renewals_without_a_reply_are_unknown(&proxy, &store).await;
    laws::unknown::an_unknown_request_leaves_nothing(&proxy, &store, &open(server.addr()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_was_released_meanwhile() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    laws::unknown::a_grant_that_was_released_meanwhile_is_not_reported(&store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_release_leaves_nothing() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let store = unlucky(&proxy).await;
    let other = open(server.addr()).await;
    laws::unknown::a_release_that_was_given_up_leaves_nothing(&proxy, &store, &other).await;
}

/// A release cancels a request before the request has enqueued itself: without a check it would enqueue afterwards and
/// stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_request_does_not_enqueue() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (open(proxy.addr()).await, open(server.addr()).await);
    let held = take(&other, &request("x")).await;
    // The store knows that the lock is contended; the lease of queue entries does not exist yet.
    refused(&store, &request("x")).await;
    let waits = with(request("x"), |request| request.wait = Wait::Forever);
    let mut asked = std::pin::pin!(store.acquire(&waits));
    proxy.hold(Direction::Replies);
    assert!(futures_util::poll!(&mut asked).is_pending());
    proxy.heal();
    assert_eq!(give_back(&store, &waits.key).await, ReleaseOutcome::AlreadyGone);
    let outcome = soon("the cancelled call ends", asked).await;
    assert!(matches!(outcome, Err(Error::Unavailable(_))), "{outcome:?}");
    assert_eq!(other.inspect(&laws::name("x")).await.unwrap().unwrap().waiting, 0);
    give_back(&other, &held.key).await;
    is_free(&other, "x").await;
}

/// A request with an unknown outcome has ended, and the process looks for its keys. Then the caller sends it again
/// with the same attempt, and it is granted. The process finds that grant, and must not end it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_request_is_not_ended() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    let held = take(&other, &request("x")).await;
    let doubted = with(request("x"), |request| request.ttl = Duration::from_secs(1));
    proxy.hold(Direction::Replies);
    assert!(store.acquire(&doubted).await.is_err());
    proxy.cut_all();
    // No event shows that its ttl has ended while the server is unreachable.
    tokio::time::sleep(doubted.ttl * 2).await;
    give_back(&other, &held.key).await;
    proxy.heal();
    let again = with(doubted, |request| request.ttl = TTL);
    let mut asked = std::pin::pin!(store.acquire(&again));
    // Until it is granted, and has not processed the reply.
    while other.inspect(&laws::name("x")).await.unwrap().is_none() {
        until_reply(asked.as_mut()).await;
    }
    let before = handled(server.addr(), "Txn");
    let looked_for =
        eventually("the process looked for it", || async { handled(server.addr(), "Txn") > before });
    // The process may have looked before the grant: then this run shows nothing.
    _ = tokio::time::timeout(Duration::from_secs(2), looked_for).await;
    let Ok(AcquireOutcome::Granted(grant)) = soon("the call ends", asked).await else {
        panic!("it was granted")
    };
    refused(&other, &request("x")).await;
    assert_eq!(store.renew(std::slice::from_ref(&grant)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&store, &grant.key).await;
    is_free(&other, "x").await;
}

/// A store renews a grant of another store, which attaches the grant to its own lease. If no reply comes, and no
/// client renews it again, it ends with its ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_may_be_taken_over_ends_in_time() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    let short = |text: &str| with(request(text), |request| request.ttl = Duration::from_secs(2));
    for n in 1..=4 {
        let text = format!("x/{n}");
        let held = take(&other, &short(&text)).await;
        proxy.inject(Fault::at_request(n).cut_before_reply());
        // Any outcome.
        _ = store.renew(&[held]).await;
        proxy.heal();
        is_free(&other, &text).await;
    }
}

/// A request without a reply is delayed for long: etcd applies it after another request was granted the lock and
/// released it. It then grants the lock to no live caller, under a lease that this process keeps alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_request_is_found_and_ended() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let store = unlucky(&proxy).await;
    let other = &open(server.addr()).await;
    let kept = take(&store, &request("kept")).await;
    let late = proxy.inject(Fault::at_request(1).deliver_late());
    let asked = request("x");
    let outcome = store.acquire(&asked).await;
    assert!(matches!(outcome, Err(Error::Unknown(_))) && late.fired(), "{outcome:?}");
    let grant = take(&store, &asked).await;
    give_back(&store, &grant.key).await;
    late.release();
    eventually("it has arrived", || async { other.inspect(&laws::name("x")).await.unwrap().is_some() }).await;
    is_free(other, "x").await;
    give_back(&store, &kept.key).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_during_an_outage() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    laws::unknown::a_wait_that_ends_during_an_outage_leaves_nothing(&proxy, &store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    // Creates the leases that both need.
    give_back(&store, &take(&store, &request("first")).await.key).await;
    for queued in [false, true] {
        let (proxies, late) = (std::slice::from_ref(&proxy), Fault::at_request(1).deliver_late());
        let arrived =
            laws::unknown::late_request_takes_nothing(proxies, (&store, &other), late, queued).await;
        assert!(arrived, "nothing is shown: etcd did not answer the late request (queued: {queued})");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_noticed_while_callers_come_and_go() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let open = async |addr| try_open(&format!("etcd://{addr}?timeout=1s")).await.unwrap();
    laws::silence::a_silent_server_is_noticed_while_callers_come_and_go(server.addr(), Framing::Http2, open)
        .await;
}

/// With the default claim of 10 s, shortened by the ttl of 2 s. Dead waiters used to cost twelve seconds whatever
/// their ttl was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_of_a_short_ttl_cost_little_more_than_that() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let open = async |addr| try_open(&format!("etcd://{addr}")).await.unwrap();
    let bound = Duration::from_secs(5);
    laws::wake::dead_waiters_of_a_short_ttl_cost_no_more_than(bound, server.addr(), Framing::Http2, open)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let open = async |addr| try_open(&format!("etcd://{addr}?timeout=2s&poll=2s&claim=4s")).await.unwrap();
    laws::wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::Http2, open).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_claim_does_not_shorten_that_of_another_client() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let patient = try_open(&format!("etcd://{}?timeout=30s&claim=10m", proxy.addr())).await.unwrap();
    let hasty = try_open(&format!("etcd://{}?timeout=20s&claim=2s", server.addr())).await.unwrap();
    // etcd gives no lease below two seconds.
    let silence = std::time::Duration::from_secs(3);
    laws::hand_off::a_short_claim_does_not_shorten_that_of_another_client(
        &proxy,
        (&patient, &hasty),
        silence,
    )
    .await;
}
