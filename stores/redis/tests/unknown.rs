//! Requests that may have happened. One client talks through a proxy that breaks its connection at the first message, at
//! the second, and so on until nothing is left to break; another looks at what that leaves behind.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_core::{Error, Fence, ReleaseOutcome, Store};
use lockkeeper_host::SystemClock;
use lockkeeper_redis::{Options, RedisStore};
use lockkeeper_testkit::laws::{self, eventually, give_back, is_free, request, soon, take};
use lockkeeper_testkit::proxy::{At, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::servers::{self, RedisOptions, Server, redis_call};

const TTL: Duration = Duration::from_secs(20);

async fn open(addr: impl std::fmt::Display) -> Result<Arc<dyn Store>, Error> {
    open_with(addr, "claim=2s").await
}

async fn open_with(addr: impl std::fmt::Display, more: &str) -> Result<Arc<dyn Store>, Error> {
    let url = format!("redis://{addr}?timeout=300ms&poll=100ms&{more}");
    Ok(Arc::new(RedisStore::open(Options::from_url(&url)?).await?))
}

async fn open_at(url: &str) -> Arc<dyn Store> {
    Arc::new(RedisStore::open(Options::from_url(url).unwrap()).await.unwrap())
}

/// A client behind a proxy, and one that talks past it. No claim ends within a test: what goes was removed.
async fn two_clients(server: &Server) -> (Proxy, Arc<dyn Store>, Arc<dyn Store>) {
    let proxy = Proxy::start(server.addr(), Framing::Resp);
    let key = "claim=10m";
    let (store, other) = (open_with(proxy.addr(), key).await, open_with(server.addr(), key).await);
    (proxy, store.unwrap(), other.unwrap())
}

/// The calls of a client whose connection breaks, from the first to the last. All outcomes must be as without the fault.
async fn story(proxy: &Proxy, other: &Arc<dyn Store>) {
    // Nothing happened when it cannot even be opened.
    let store = loop {
        match open(proxy.addr()).await {
            Ok(store) => break store,
            Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    // A free lock: granted once, whatever was heard of it.
    let guard = soon("a free lock is granted", keeper.lock("x").ttl(TTL).acquire()).await.unwrap();
    let seen = other.inspect(&laws::name("x")).await.unwrap().unwrap();
    assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [guard.fence()]);
    // A lock that is waited for: handed over once, to the one that waits.
    let held = take(other, &request("y")).await;
    let waiter = tokio::spawn(keeper.lock("y").ttl(TTL).acquire());
    laws::queue_reaches(other, &laws::name("y"), 1).await;
    give_back(other, &held.key).await;
    let next = soon("the waiter is served", waiter).await.unwrap();
    // An error is right only if the waiter lost its hand-off for good, and then it holds no lock.
    let next = next.unwrap_or_else(|error| panic!("the waiter was let down: {error}"));
    assert!(next.fence() > held.fence);
    // A release that may have happened is a release in the end.
    match soon("a release ends", guard.release()).await {
        Ok(ReleaseOutcome::Released | ReleaseOutcome::AlreadyGone)
        | Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
        Err(error) => panic!("{error}"),
    }
    drop(next);
    soon("what is left is given back", keeper.settle()).await;
    is_free(other, "x").await;
    is_free(other, "y").await;
}

async fn break_everywhere(server: &Server, kind: &str, fault: fn(At) -> Fault) {
    let other = open(server.addr()).await.unwrap();
    let mut last: Option<Fence> = None;
    let points = every_point(300, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::Resp);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        story(&proxy, &other).await;
        let grant = take(&other, &request("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.key).await;
        injected.fired()
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 8, "the story has more than {points} requests");
    // Nothing is left but the counter, once the queue entries of those who are gone are over.
    eventually("nothing is left behind", || async {
        redis_call(server.addr(), &["KEYS", "*"]).unwrap() == "lockkeeper:{all}:fence"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    break_everywhere(&server, "answered, and cut before the reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    break_everywhere(&server, "reset before the request is passed on", At::reset).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_swallows_everything_from_a_request_on() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    break_everywhere(&server, "held for ever", At::hold).await;
}

#[test]
fn no_runtime_of_the_users_is_needed() {
    // Also not for what waits: timers of ours are on our own thread.
    let Ok(mut server) = servers::redis(RedisOptions::default()) else { return };
    let url = format!("redis://{}?timeout=300ms&poll=100ms&claim=2s", server.addr());
    futures_executor::block_on(async {
        let keeper = Lockkeeper::open(&url).await.unwrap();
        let held = keeper.lock("x").ttl(TTL).acquire().await.unwrap();
        let other = keeper.clone();
        let waiter = std::thread::spawn(move || {
            futures_executor::block_on(other.lock("x").ttl(TTL).acquire()).map(|guard| guard.fence())
        });
        while keeper.inspect("x").await.unwrap().is_none_or(|view| view.waiting == 0) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // It goes on waiting while the server is unreachable, and after that.
        server.restart();
        assert!(waiter.join().unwrap().unwrap() > held.fence(), "forgotten, and granted anew");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_twice_would_be_harmless() {
    // No network does this to a connection; a retry does. The scripts must not mind.
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(server.addr()).await.unwrap();
    let once = request("x");
    let (first, again) = tokio::join!(take(&store, &once), take(&store, &once));
    assert_eq!(first.fence, again.fence);
    let (one, two) = tokio::join!(store.release(&once.key), store.release(&once.key));
    let released =
        [one.unwrap(), two.unwrap()].iter().filter(|answer| **answer == ReleaseOutcome::Released).count();
    assert_eq!(released, 1);
    is_free(&store, "x").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_without_a_reply_leaves_anything() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (proxy, store, other) = two_clients(&server).await;
    laws::unknown::renewals_without_a_reply_are_unknown(&proxy, &store).await;
    laws::unknown::an_unknown_request_leaves_nothing(&proxy, &store, &other).await;
    laws::unknown::a_release_that_was_given_up_leaves_nothing(&proxy, &store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_during_an_outage_leaves_nothing() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (proxy, store, other) = two_clients(&server).await;
    laws::unknown::a_wait_that_ends_during_an_outage_leaves_nothing(&proxy, &store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release_takes_nothing() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (proxy, store, other) = two_clients(&server).await;
    let arrived =
        laws::unknown::a_request_that_arrives_after_its_release_takes_nothing(&proxy, &store, &other).await;
    assert!(arrived, "nothing is shown: the late request was not answered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_was_released_meanwhile_is_not_reported() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await.unwrap(), open(server.addr()).await.unwrap());
    laws::unknown::a_grant_that_was_released_meanwhile_is_not_reported(&store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_noticed_while_callers_come_and_go() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let open = async |addr| open(addr).await.unwrap();
    laws::silence::a_silent_server_is_noticed_while_callers_come_and_go(server.addr(), Framing::Resp, open)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_claim_does_not_shorten_that_of_another_client() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Resp);
    let patient = open_at(&format!("redis://{}?timeout=30s&poll=5m&claim=10m", proxy.addr())).await;
    let hasty = open_at(&format!("redis://{}?poll=50ms&claim=100ms", server.addr())).await;
    let silence = Duration::from_secs(1);
    laws::hand_off::a_short_claim_does_not_shorten_that_of_another_client(
        &proxy,
        (&patient, &hasty),
        silence,
    )
    .await;
}
