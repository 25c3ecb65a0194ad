//! Requests that may have happened. One client talks through a proxy that breaks its connection at the first request, at
//! the second, and so on until nothing is left to break; another looks at what that leaves behind.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{moto, open, table, try_open, url};
use lockkeeper::{Lockkeeper, SystemClock};
use lockkeeper_core::{Error, Expect, Fence, Release, Result, Store, Write};
use lockkeeper_testkit::laws::{self, ask, ask_all, eventually, give_back, is_free, name, soon, take};
use lockkeeper_testkit::proxy::{At, Fault, Framing, Pick, Proxy, every_point};

const TTL: Duration = Duration::from_secs(60);

/// Does it again while nothing has happened.
async fn until_done<T>(what: &str, mut work: impl AsyncFnMut() -> Result<T>) -> T {
    soon(what, async {
        loop {
            match work().await {
                Ok(done) => return done,
                Err(Error::Unavailable(_)) => {}
                Err(error) => panic!("{what}: {error}"),
            }
        }
    })
    .await
}

/// What an unlucky client does, from its first word to its last. Everything must come out as if nothing had happened.
async fn story(address: &str, other: &Arc<dyn Store>) {
    let store = until_done("it is opened", async || try_open(address).await).await;
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    // A free lock: granted once, whatever was heard of it.
    let guard =
        until_done("a free lock is granted", async || keeper.lock("x").ttl(TTL).acquire().await).await;
    let seen = other.inspect(&name("x")).await.unwrap().unwrap();
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
    laws::in_line(other, &name("y"), 1).await;
    give_back(other, &held.claim).await;
    let next = soon("the waiter is served", waiter).await.unwrap();
    let next = next.unwrap_or_else(|error| panic!("the waiter was let down: {error}"));
    assert!(next.fence() > held.fence);
    // Two at once: both or none.
    let both =
        until_done("both are granted", async || keeper.lock_all(["m", "n"]).ttl(TTL).acquire().await).await;
    for one in ["m", "n"] {
        let seen = other.inspect(&name(one)).await.unwrap().unwrap();
        assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [both.fence()]);
    }
    record(&store, other).await;
    // A release that may have happened is a release in the end.
    match soon("a release ends", guard.release()).await {
        Ok(Release::Released | Release::AlreadyGone) | Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
        Err(error) => panic!("{error}"),
    }
    drop((next, both));
    soon("what is left is given back", keeper.settle()).await;
    for one in ["x", "y", "m", "n"] {
        is_free(other, one).await;
    }
}

/// A write that may have happened did so once or not at all.
async fn record(store: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    let before = other.read(&name("r")).await.unwrap();
    let expect = before.as_ref().map_or(Expect::Absent, |record| Expect::Version(record.version));
    let written = store.write(&name("r"), b"new", expect, None).await;
    let after = other.read(&name("r")).await.unwrap();
    match written {
        Ok(Write::Written(version)) => assert_eq!(after.unwrap().version, version),
        Err(Error::Unavailable(_)) => assert_eq!(after, before, "it was to have not happened"),
        Err(Error::Unknown(_)) => {
            let newer =
                |record: &lockkeeper_core::Record| before.as_ref().is_none_or(|b| record.version > b.version);
            assert!(after == before || after.as_ref().is_some_and(newer));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    // The usual times: what is declared is made of them.
    let address = |at| format!("dynamodb://test:secret@eu-central-1/{table}?endpoint=http://{at}");
    let open = async |at| open(&address(at)).await;
    laws::wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::Http1, open).await;
}

async fn break_everywhere(kind: &str, fault: fn(At) -> Fault) {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let other = open(&url(server.addr(), &table)).await;
    let mut last: Option<Fence> = None;
    let points = every_point(400, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::Http1);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        story(&url(proxy.addr(), &table), &other).await;
        let grant = take(&other, &ask("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.claim).await;
        injected.fired()
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 10, "the story has more than {points} requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    break_everywhere("answered, and cut before the reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    break_everywhere("reset before the request is passed on", At::reset).await;
}

/// A request that nobody waits for any more, and that arrives when its ask has been taken back: it must not take the lock for
/// somebody who is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_the_release() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let other = open(&url(server.addr(), &table)).await;
    for (names, kind) in [(&["x"][..], "PutItem"), (&["m", "n"], "TransactWriteItems")] {
        let proxy = Proxy::start(server.addr(), Framing::Http1);
        let address = url(proxy.addr(), &table).replace("timeout=10s", "timeout=1s");
        let store = until_done("it is opened", async || try_open(&address).await).await;
        let held = proxy.inject(Fault::at_request(1).on(Pick::sent(kind)).hold());
        let ask = ask_all(names);
        let answer = store.acquire(&ask).await;
        assert!(held.fired() && matches!(answer, Err(Error::Unknown(_))), "{answer:?}");
        soon("it is taken back", async {
            while let Err(error) = store.release(&ask.claim).await {
                assert!(matches!(error, Error::Unknown(_) | Error::Unavailable(_)), "{error}");
            }
        })
        .await;
        let before = proxy.count().replies;
        held.release();
        eventually("it arrives and is answered", || async { proxy.count().replies > before }).await;
        for one in names {
            assert_eq!(other.inspect(&name(one)).await.unwrap(), None, "it is held by nobody");
        }
    }
}
