//! Requests that may have happened. One client talks through a proxy that breaks its connection at the first message, at
//! the second, and so on until nothing is left to break; another looks at what that leaves behind.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{ctl, handled, keeper, open, try_open, until_answered};
use futures_util::future::join_all;
use lockkeeper_core::{Acquired, Error, Fence, Release, Renewal, Store, Wait};
use lockkeeper_testkit::laws::{self, ask, eventually, give_back, is_free, refused, soon, take, with};
use lockkeeper_testkit::proxy::{At, Direction, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::servers::{self, EtcdOptions, Server};

const TTL: Duration = Duration::from_secs(20);

/// What an unlucky client does, from its first word to its last. Everything must come out as if nothing had happened.
async fn story(proxy: &Proxy, other: &Arc<dyn Store>) {
    // Nothing happened when it cannot even be opened.
    let store = loop {
        match try_open(&format!("etcd://{}?timeout=500ms&poll=200ms", proxy.addr())).await {
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
        let proxy = Proxy::start(server.addr(), Framing::Http2);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        story(&proxy, &other).await;
        let grant = take(&other, &ask("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.claim).await;
        injected.fired()
    })
    .await;
    // Nothing is left but the base, and the reason for the last break or expiry.
    eventually("nothing is left behind", || async {
        let keys = ctl(server.addr(), &["get", "", "--prefix", "--keys-only"]);
        keys.split_whitespace().all(|key| ["lock//base", "lock//why"].contains(&key))
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 8, "the story has more than {points} requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    break_everywhere(&server, "answered, and cut before the reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    break_everywhere(&server, "reset before the request is passed on", At::reset).await;
}

/// One that waits long enough for a busy machine: what it must not hear is held back or cut for as long as that takes.
async fn unlucky(proxy: &Proxy) -> Arc<dyn Store> {
    try_open(&format!("etcd://{}?timeout=2s&poll=200ms", proxy.addr())).await.expect("it opens")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_stays_of_what_nobody_heard_of() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let store = unlucky(&proxy).await;
    laws::doubt::an_ask_in_doubt_leaves_nothing(&proxy, &store, &open(server.addr()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_stays_of_what_the_library_has_given_up_on() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let store = unlucky(&proxy).await;
    let other = open(server.addr()).await;
    laws::doubt::a_release_that_was_given_up_leaves_nothing(&proxy, &store, &other).await;
}

/// The ask has not written itself down when it is taken back, and does so afterwards: nobody would look for it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ask_that_was_taken_back_does_not_stand_in_line() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let held = take(&other, &ask("x")).await;
    // Somebody is known to be in the way; what is missing is the lease of the place in line.
    refused(&store, &ask("x")).await;
    let waits = with(ask("x"), |ask| ask.wait = Wait::Forever);
    let mut asked = std::pin::pin!(store.acquire(&waits));
    assert!(futures_util::poll!(&mut asked).is_pending());
    assert_eq!(give_back(&store, &waits.claim).await, Release::AlreadyGone);
    let told = soon("it hears that it was taken back", asked).await;
    assert!(matches!(told, Err(Error::Unavailable(_))), "{told:?}");
    assert_eq!(other.inspect(&laws::name("x")).await.unwrap().unwrap().waiting, 0);
    give_back(&other, &held.claim).await;
    is_free(&other, "x").await;
}

/// An ask in doubt is over, and what it may have got is looked for; then it is asked again with the same attempt, and granted. What was looked
/// for is found, and is somebody's now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_again_is_not_taken_back() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    let held = take(&other, &ask("x")).await;
    let doubted = with(ask("x"), |ask| ask.ttl = Duration::from_secs(1));
    proxy.hold(Direction::Replies);
    assert!(store.acquire(&doubted).await.is_err());
    proxy.cut_all();
    // Nothing tells that its time is over, and that nobody is there to be asked.
    tokio::time::sleep(doubted.ttl * 2).await;
    give_back(&other, &held.claim).await;
    proxy.heal();
    let again = with(doubted, |ask| ask.ttl = TTL);
    let mut asked = std::pin::pin!(store.acquire(&again));
    // Until it is granted, and has not heard of it.
    while other.inspect(&laws::name("x")).await.unwrap().is_none() {
        until_answered(asked.as_mut()).await;
    }
    let before = handled(server.addr(), "Txn");
    let looked_for = eventually("it was looked for", || async { handled(server.addr(), "Txn") > before });
    // Or before it was granted: then there is nothing to see here.
    _ = tokio::time::timeout(Duration::from_secs(2), looked_for).await;
    let Ok(Acquired::Granted(grant)) = soon("an answer", asked).await else { panic!("it was granted") };
    refused(&other, &ask("x")).await;
    assert_eq!(store.renew(std::slice::from_ref(&grant)).await.unwrap(), [Renewal::Renewed]);
    give_back(&store, &grant.claim).await;
    is_free(&other, "x").await;
}

/// A grant of another store is renewed, which puts it under a lease of this one. If that is not heard of, and nobody renews it again, it is over
/// when its ttl is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_have_been_taken_over_ends_in_time() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    let short = |text: &str| with(ask(text), |ask| ask.ttl = Duration::from_secs(2));
    for n in 1..=4 {
        let text = format!("x/{n}");
        let held = take(&other, &short(&text)).await;
        proxy.inject(Fault::at_request(n).cut_before_reply());
        // Whatever it is told.
        _ = store.renew(&[held]).await;
        proxy.heal();
        is_free(&other, &text).await;
    }
}

/// A request that nobody heard of is on its way for long: it arrives when its lock was granted by another one, and given back. The lock goes to
/// nobody then, under a lease that this process keeps alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_arrives_late_is_looked_for() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let store = unlucky(&proxy).await;
    let other = &open(server.addr()).await;
    let kept = take(&store, &ask("kept")).await;
    let texts = ["x/0", "x/1", "x/2", "x/3"];
    for text in texts {
        let late = proxy.inject(Fault::at_request(1).hold());
        let asked = ask(text);
        let told = store.acquire(&asked).await;
        assert!(matches!(told, Err(Error::Unknown(_))) && late.fired(), "{told:?}");
        let grant = take(&store, &asked).await;
        give_back(&store, &grant.claim).await;
        late.release();
    }
    // Now and then etcd notices before it begins that nobody waits for the answer.
    eventually("one of them has arrived", || async {
        let seen = texts.map(|text| async move { other.inspect(&laws::name(text)).await.unwrap() });
        join_all(seen).await.iter().any(Option::is_some)
    })
    .await;
    for text in texts {
        is_free(other, text).await;
    }
    give_back(&store, &kept.claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_during_an_outage() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    laws::doubt::a_wait_that_ends_during_an_outage_leaves_nothing(&proxy, &store, &other).await;
}

/// etcd may notice that nobody waits for the answer, and then the late request does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let (store, other) = (unlucky(&proxy).await, open(server.addr()).await);
    // What both need beside the request itself is there.
    give_back(&store, &take(&store, &ask("first")).await.claim).await;
    laws::doubt::a_request_that_arrives_after_its_release_takes_nothing(&proxy, &store, &other).await;
}

/// The claim follows a short ttl: dead waiters cost twelve seconds, whatever their ttl was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let open = async |addr| try_open(&format!("etcd://{addr}?timeout=2s&poll=2s&claim=4s")).await.unwrap();
    laws::wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::Http2, open).await;
}
