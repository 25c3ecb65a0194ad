//! Requests that may have happened. One client talks through a proxy that breaks its connection at the first message, at
//! the second, and so on until nothing is left to break; another looks at what that leaves behind.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{keeper, number, try_open, url};
use lockkeeper_core::{Error, Fence, Release, Store};
use lockkeeper_testkit::laws::{self, ask, eventually, give_back, is_free, soon, take};
use lockkeeper_testkit::proxy::{At, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

const TTL: Duration = Duration::from_secs(20);

async fn open(addr: impl std::fmt::Display) -> Result<Arc<dyn Store>, Error> {
    // Long enough for a slow disk to answer.
    try_open(&format!("{}?timeout=1s&poll=100ms&claim=2s", url(addr))).await
}

/// What an unlucky client does, from its first word to its last. Everything must come out as if nothing had happened.
async fn story(proxy: &Proxy, other: &Arc<dyn Store>) {
    // Nothing happened when it cannot even be opened.
    let store = loop {
        match open(proxy.addr()).await {
            Ok(store) => break store,
            Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let keeper = keeper(&store);
    // A free lock: granted once, whatever was heard of it.
    let guard = soon("a free lock is granted", keeper.lock("x").ttl(TTL).acquire()).await.unwrap();
    let seen = other.inspect(&laws::name("x")).await.unwrap().unwrap();
    assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [guard.fence()]);
    // A lock that is waited for: handed over once, to the one that waits.
    let held = take(other, &ask("y")).await;
    let waiter = tokio::spawn(keeper.lock("y").ttl(TTL).acquire());
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
    let other = open(server.addr()).await.unwrap();
    let mut last: Option<Fence> = None;
    let points = every_point(300, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::Postgres);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        story(&proxy, &other).await;
        let grant = take(&other, &ask("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.claim).await;
        injected.fired()
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 8, "the story has more than {points} requests");
    // Nothing is left but two free rows, once the places in line of those who are gone are over.
    let rows = "SELECT (SELECT count(*) FROM lockkeeper.waiter) + (SELECT count(*) FROM lockkeeper.hold) \
                + (SELECT count(*) FROM lockkeeper.lock WHERE attempt IS NOT NULL OR expires > 0)";
    eventually("nothing is left behind", || async { number(server, rows) == 0 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    break_everywhere(&server, "answered, and cut before the reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    break_everywhere(&server, "reset before the request is passed on", At::reset).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_swallows_everything_from_a_request_on() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    break_everywhere(&server, "held for ever", At::hold).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_twice_would_be_harmless() {
    // No network does this to a connection; a retry does. The functions must not mind.
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = open(server.addr()).await.unwrap();
    let once = ask("x");
    let (first, again) = tokio::join!(take(&store, &once), take(&store, &once));
    assert_eq!(first.fence, again.fence);
    let (one, two) = tokio::join!(store.release(&once.claim), store.release(&once.claim));
    let released = [one.unwrap(), two.unwrap()].iter().filter(|answer| **answer == Release::Released).count();
    assert_eq!(released, 1);
    is_free(&store, "x").await;
}
