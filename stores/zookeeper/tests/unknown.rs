//! Requests that may have happened. One client talks through a proxy that breaks its connection at the first message, at
//! the second, and so on until nothing is left to break; another looks at what that leaves behind.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, keeper, open, tree, try_open};
use lockkeeper_core::{Acquired, Error, Fence, Release, Store};
use lockkeeper_testkit::laws::{self, ask, eventually, give_back, is_free, soon, take, with};
use lockkeeper_testkit::proxy::{At, Direction, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};

const TTL: Duration = Duration::from_secs(20);

/// What an unlucky client does, from its first word to its last. Everything must come out as if nothing had happened.
async fn story(proxy: &Proxy, other: &Arc<dyn Store>) {
    // Nothing happened when it cannot even be opened.
    let store = loop {
        match try_open(&format!("zk://{}?timeout=500ms&poll=200ms&session=4s", proxy.addr())).await {
            Ok(store) => break store,
            Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let keeper = keeper(&store);
    // A free lock: granted once, whatever was heard of it.
    let guard = loop {
        match soon("a free lock is granted", keeper.lock("x").ttl(TTL).acquire()).await {
            Ok(guard) => break guard,
            Err(Error::Unavailable(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let seen = other.inspect(&laws::name("x")).await.unwrap().unwrap();
    assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [guard.fence()]);
    // A lock that is waited for: handed over once, to the one that waits.
    let held = take(other, &ask("y")).await;
    let keeper2 = keeper.clone();
    let waiter = tokio::spawn(async move {
        loop {
            match keeper2.lock("y").ttl(TTL).acquire().await {
                Err(Error::Unavailable(_)) => {}
                other => break other,
            }
        }
    });
    laws::in_line(other, &laws::name("y"), 1).await;
    give_back(other, &held.claim).await;
    let next = soon("the waiter is served", waiter).await.unwrap();
    let next = next.unwrap_or_else(|error| panic!("the waiter was let down: {error}"));
    assert!(next.fence() > held.fence);
    // A release that may have happened is a release in the end.
    match soon("a release ends", guard.release()).await {
        Ok(Release::Released | Release::AlreadyGone) | Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
        Err(error) => panic!("{error}"),
    }
    drop(next);
    soon("what is left is given back", keeper.settle()).await;
    is_free(other, "x").await;
    is_free(other, "y").await;
}

async fn break_everywhere(server: &Server, kind: &str, fault: fn(At) -> Fault) {
    let other = open(server.addr()).await;
    let mut last: Option<Fence> = None;
    let points = every_point(400, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        story(&proxy, &other).await;
        let grant = take(&other, &ask("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.claim).await;
        injected.fired()
    })
    .await;
    // Nothing is left but the base, and the nodes that lines were below.
    let admin = admin(server.addr()).await;
    eventually("nothing is left behind", || async {
        tree(&admin, "/lock").await.iter().all(|node| !node.contains("-lock-") && !node.contains("=back"))
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 8, "the story has more than {points} requests");
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

/// The answer to an ask was lost, the next try could not even be sent, and there was no third one. The second was taken for the
/// whole story, and what the first had got was in nobody's book: the lock was stuck for as long as the process lived.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_is_not_forgotten_over_a_try_that_was_never_sent() {
    // A session that does not end meanwhile.
    let options = ZooKeeperOptions { extra: vec!["maxSessionTimeout=90000".into()], ..Default::default() };
    let Ok(server) = servers::zookeeper(options) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=3s&session=90s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    // The first ask makes what is missing; the next one is a single request.
    give_back(&store, &take(&store, &ask("x")).await.claim).await;
    let fault = proxy.inject(Fault::at_request(1).cut_before_reply());
    let lost = with(ask("x"), |ask| ask.ttl = Duration::from_secs(5));
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
        matches!(other.acquire(&ask("x")).await, Ok(Acquired::Granted(_)))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_stays_of_what_nobody_heard_of() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    // A session that outlasts the trouble: it does not help.
    let url = format!("zk://{}?timeout=500ms&poll=200ms&session=30s", proxy.addr());
    let store = try_open(&url).await.unwrap();
    let other = open(server.addr()).await;
    laws::doubt::an_ask_in_doubt_leaves_nothing(&proxy, &store, &other).await;
    laws::doubt::a_release_that_was_given_up_leaves_nothing(&proxy, &store, &other).await;
}

/// A release that was dropped, or that failed twice, was in nobody's book: what it was to give back stayed for as long as the process lived.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_was_given_back_in_vain_does_not_stay() {
    let options = ZooKeeperOptions { extra: vec!["maxSessionTimeout=90000".into()], ..Default::default() };
    let Ok(server) = servers::zookeeper(options) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    // A session that does not end meanwhile: it would help.
    let store = try_open(&format!("zk://{}?timeout=3s&session=90s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    let held = take(&store, &ask("dropped")).await;
    proxy.hold(Direction::Requests);
    let dropped = tokio::time::timeout(Duration::from_millis(50), store.release(&held.claim)).await;
    assert!(dropped.is_err(), "nobody was there to answer: {dropped:?}");
    proxy.cut_all();
    proxy.heal();
    is_free(&other, "dropped").await;

    let held = take(&store, &ask("failed")).await;
    proxy.cut_all();
    for _ in 0..2 {
        let failed = soon("a release ends", store.release(&held.claim)).await;
        assert!(matches!(failed, Err(Error::Unknown(_) | Error::Unavailable(_))), "{failed:?}");
    }
    proxy.heal();
    is_free(&other, "failed").await;
}

/// An attempt that is asked again after its grant was broken stands in line. It was given its old fence if that ask was given up, and
/// the attempt asked once more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_grant_is_not_found_again() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let asked = ask("x");
    take(&store, &asked).await;
    other.break_lock(&laws::name("x"), "to see what happens").await.unwrap();
    let holds = take(&other, &ask("x")).await;
    let waits = laws::stand_in_line(&store, &asked, 1).await;
    waits.abort();
    _ = waits.await;
    laws::refused(&store, &asked).await;
    give_back(&other, &holds.claim).await;
    let next = take(&store, &asked).await;
    assert!(next.fence > holds.fence);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_during_an_outage() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=2s&poll=200ms&session=30s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    laws::doubt::a_wait_that_ends_during_an_outage_leaves_nothing(&proxy, &store, &other).await;
}

/// A server that a session reconnects to closes the session's old connection, and what it still brings does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=2s&poll=200ms&session=30s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    // What both need beside the request itself is there.
    give_back(&store, &take(&store, &ask("first")).await.claim).await;
    laws::doubt::a_request_that_arrives_after_its_release_takes_nothing(&proxy, &store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let open = async |addr| try_open(&format!("zk://{addr}?timeout=2s&poll=2s&session=4s")).await.unwrap();
    laws::wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::ZooKeeper, open).await;
}
