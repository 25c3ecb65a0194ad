//! Unknown outcomes. One client uses a proxy that breaks its connection at the first request, at the second, and so on until
//! every request was broken once; another client checks the state that this leaves.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{moto, open, table, try_open, url};
use lockkeeper::{Lockkeeper, SystemClock};
use lockkeeper_core::{Error, Expect, Fence, ReleaseOutcome, Result, Store, WriteOutcome};
use lockkeeper_testkit::laws::{
    self, eventually, give_back, is_free, name, request, request_all, soon, take,
};
use lockkeeper_testkit::proxy::{At, Fault, Framing, Pick, Proxy, every_point};

const TTL: Duration = Duration::from_secs(60);

/// Repeats work for as long as it fails with `Unavailable`: then nothing was executed.
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

/// All operations of a client whose connection is broken once. Every outcome must be as without the fault.
async fn run_all_operations(address: &str, other: &Arc<dyn Store>) {
    let store = until_done("it is opened", async || try_open(address).await).await;
    let keeper = Lockkeeper::with_store(store.clone(), Arc::new(SystemClock));
    // A free lock is granted once, also if the reply was lost.
    let guard =
        until_done("a free lock is granted", async || keeper.lock("x").ttl(TTL).acquire().await).await;
    let seen = other.inspect(&name("x")).await.unwrap().unwrap();
    assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [guard.fence()]);
    // A lock that is released is granted once, to the waiter.
    let held = take(other, &request("y")).await;
    let keeper2 = keeper.clone();
    let waiter = tokio::spawn(async move {
        loop {
            match keeper2.lock("y").ttl(TTL).acquire().await {
                Err(Error::Unavailable(_)) => {}
                other => break other,
            }
        }
    });
    laws::queue_reaches(other, &name("y"), 1).await;
    give_back(other, &held.key).await;
    let next = soon("the waiter is granted the lock", waiter).await.unwrap();
    let next = next.unwrap_or_else(|error| panic!("the waiter failed: {error}"));
    assert!(next.fence() > held.fence);
    // Two names are granted together or not at all.
    let both =
        until_done("both are granted", async || keeper.lock_all(["m", "n"]).ttl(TTL).acquire().await).await;
    for one in ["m", "n"] {
        let seen = other.inspect(&name(one)).await.unwrap().unwrap();
        assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [both.fence()]);
    }
    record(&store, other).await;
    // A release with an unknown outcome is carried out in the end.
    match soon("a release ends", guard.release()).await {
        Ok(ReleaseOutcome::Released | ReleaseOutcome::AlreadyGone)
        | Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
        Err(error) => panic!("{error}"),
    }
    drop((next, both));
    soon("the rest is released", keeper.settle()).await;
    for one in ["x", "y", "m", "n"] {
        is_free(other, one).await;
    }
}

/// A write with an unknown outcome was executed once or not at all.
async fn record(store: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    let before = other.read(&name("r")).await.unwrap();
    let expect = before.as_ref().map_or(Expect::Absent, |record| Expect::Version(record.version));
    let written = store.write(&name("r"), b"new", expect, None).await;
    let after = other.read(&name("r")).await.unwrap();
    match written {
        Ok(WriteOutcome::Written(version)) => assert_eq!(after.unwrap().version, version),
        Err(Error::Unavailable(_)) => {
            assert_eq!(after, before, "a write that failed with Unavailable was executed")
        }
        Err(Error::Unknown(_)) => {
            let newer =
                |record: &lockkeeper_core::Record| before.as_ref().is_none_or(|b| record.version > b.version);
            assert!(after == before || after.as_ref().is_some_and(newer));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_noticed_while_callers_come_and_go() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let address = |at| format!("dynamodb://test:secret@eu-central-1/{table}?endpoint=http://{at}&timeout=1s");
    let open = async |at| open(&address(at)).await;
    laws::silence::a_silent_server_is_noticed_while_callers_come_and_go(server.addr(), Framing::Http1, open)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    // The default times, because the declared wake time follows from them.
    let address = |at| format!("dynamodb://test:secret@eu-central-1/{table}?endpoint=http://{at}");
    let open = async |at| open(&address(at)).await;
    laws::wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::Http1, open).await;
}

/// No waiter has a queue entry in this store, and a cancelled request leaves nothing else either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_was_given_up_leaves_nothing() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let proxy = Proxy::start(server.addr(), Framing::Http1);
    let address = url(proxy.addr(), &table).replace("timeout=10s", "timeout=1s");
    let (store, other) = (open(&address).await, open(&url(server.addr(), &table)).await);
    laws::unknown::a_release_that_was_given_up_leaves_nothing(&proxy, &store, &other).await;
}

async fn break_every_request(kind: &str, fault: fn(At) -> Fault) {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let other = open(&url(server.addr(), &table)).await;
    let mut last: Option<Fence> = None;
    let points = every_point(400, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::Http1);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        run_all_operations(&url(proxy.addr(), &table), &other).await;
        let grant = take(&other, &request("x")).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(&other, &grant.key).await;
        injected.fired()
    })
    .await;
    println!("{kind}: {points} points");
    assert!(points > 10, "only {points} requests were broken");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    break_every_request("answered, and cut before the reply", At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    break_every_request("reset before the request is passed on", At::reset).await;
}

/// A write that arrives after its lock request was released must not take the lock: its caller is gone. No waiter has a queue entry in
/// this store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release_takes_nothing() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let proxy = Proxy::start(server.addr(), Framing::Http1);
    let address = url(proxy.addr(), &table).replace("timeout=10s", "timeout=1s");
    let (store, other) = (open(&address).await, open(&url(server.addr(), &table)).await);
    let write = Fault::at_request(1).on(Pick::sent("PutItem")).hold();
    let proxies = std::slice::from_ref(&proxy);
    let arrived = laws::unknown::late_request_takes_nothing(proxies, (&store, &other), write, false).await;
    assert!(arrived, "nothing is shown: the server did not answer the late write");
}

/// The same for a transaction that takes several locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_arrives_after_its_release_takes_nothing() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    let other = open(&url(server.addr(), &table)).await;
    let proxy = Proxy::start(server.addr(), Framing::Http1);
    let address = url(proxy.addr(), &table).replace("timeout=10s", "timeout=1s");
    let store = until_done("it is opened", async || try_open(&address).await).await;
    let held = proxy.inject(Fault::at_request(1).on(Pick::sent("TransactWriteItems")).hold());
    let request = request_all(&["m", "n"]);
    let answer = store.acquire(&request).await;
    assert!(held.fired() && matches!(answer, Err(Error::Unknown(_))), "{answer:?}");
    soon("the request is released", async {
        while let Err(error) = store.release(&request.key).await {
            assert!(matches!(error, Error::Unknown(_) | Error::Unavailable(_)), "{error}");
        }
    })
    .await;
    let before = proxy.count().replies;
    held.release();
    eventually("the late write arrives", || async { proxy.count().replies > before }).await;
    for one in ["m", "n"] {
        assert_eq!(other.inspect(&name(one)).await.unwrap(), None, "the late write took the lock");
    }
}
