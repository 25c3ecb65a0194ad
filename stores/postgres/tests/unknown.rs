//! Requests with an unknown outcome. One client connects through a proxy that breaks its connection at the first message, at
//! the second, and so on until nothing is left to break; another looks at what that leaves behind. The proxy stands before the
//! server, before a pooler, or between the two.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use common::{keeper, number, try_open, url};
use futures_util::future::join_all;
use lockkeeper_core::{Error, ReleaseOutcome, Store, Wait};
use lockkeeper_testkit::laws::{
    self, eventually, give_back, is_free, request, request_all, soon, take, with,
};
use lockkeeper_testkit::proxy::{At, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// Longer than the patience of a test: a lock that is left behind does not come free by itself meanwhile.
const TTL: Duration = Duration::from_secs(90);
/// Most of a story is waiting: so many are told at once, each of locks of its own.
const PARALLEL: u64 = 6;

async fn open(addr: impl std::fmt::Display) -> Result<Arc<dyn Store>, Error> {
    // Long enough for a slow disk to answer.
    try_open(&format!("{}?timeout=1s&poll=100ms&claim=2s", url(addr))).await
}

/// Where the proxy stands.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Client, proxy, server.
    Direct,
    /// Client, proxy, pooler, server.
    BeforePooler,
    /// Client, pooler, proxy, server.
    BehindPooler,
}

/// A way that is built.
struct Road {
    proxy: Proxy,
    pooler: Option<Server>,
}

impl Road {
    async fn build(way: Way, server: SocketAddr) -> Road {
        let pooler = async |before: SocketAddr| {
            let started = tokio::task::spawn_blocking(move || servers::pgbouncer(before)).await.unwrap();
            started.unwrap_or_else(|skip| panic!("{}", skip.text()))
        };
        match way {
            Way::Direct => Road { proxy: Proxy::start(server, Framing::Postgres), pooler: None },
            Way::BeforePooler => {
                let pooler = pooler(server).await;
                Road { proxy: Proxy::start(pooler.addr(), Framing::Postgres), pooler: Some(pooler) }
            }
            Way::BehindPooler => {
                let proxy = Proxy::start(server, Framing::Postgres);
                Road { pooler: Some(pooler(proxy.addr()).await), proxy }
            }
        }
    }

    /// Where the client begins.
    fn entry(&self, way: Way) -> SocketAddr {
        match (way, &self.pooler) {
            (Way::BehindPooler, Some(pooler)) => pooler.addr(),
            _ => self.proxy.addr(),
        }
    }
}

/// What an unlucky client does, from its first word to its last. Everything must come out as if nothing had happened.
async fn story(entry: SocketAddr, other: &Arc<dyn Store>, [x, y]: [&str; 2]) {
    // Nothing happened when it cannot even be opened.
    let opened = async {
        loop {
            match open(entry).await {
                Ok(store) => break store,
                Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let store = soon("the store opens", opened).await;
    let keeper = keeper(&store);
    // A free lock: granted once, whatever was heard of it.
    let guard = soon("a free lock is granted", keeper.lock(x).ttl(TTL).acquire()).await.unwrap();
    let seen = other.inspect(&laws::name(x)).await.unwrap().unwrap();
    assert_eq!(seen.held.iter().map(|held| held.fence).collect::<Vec<_>>(), [guard.fence()]);
    // A lock that is waited for: handed over once, to the one that waits.
    let held = take(other, &request(y)).await;
    let waiter = tokio::spawn(keeper.lock(y).ttl(TTL).acquire());
    laws::queue_reaches(other, &laws::name(y), 1).await;
    give_back(other, &held.key).await;
    let next = soon("the waiter is served", waiter).await.unwrap();
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
    is_free(other, x).await;
    is_free(other, y).await;
}

async fn break_everywhere(way: Way, kind: &str, fault: fn(At) -> Fault) {
    if way != Way::Direct && servers::require("pgbouncer", "pgbouncer", "pgbouncer").is_err() {
        return;
    }
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let other = try_open(&format!("{}?timeout=20s", url(server.addr()))).await.unwrap();
    let runs = (0..PARALLEL).map(|run| break_every_nth(way, run, fault, &server, &other));
    let points: u64 = join_all(runs).await.into_iter().sum();
    println!("{way:?}, {kind}: {points} points");
    // A pooler logs in once for many, and nothing is prepared there.
    let least = if way == Way::Direct { 20 } else { 12 };
    assert!(points >= least, "the story has more than {points} requests");
    // Nothing is left but free rows, once the claims of the dead clients have ended.
    let rows = "SELECT (SELECT count(*) FROM lockkeeper.waiter) + (SELECT count(*) FROM lockkeeper.hold) \
                + (SELECT count(*) FROM lockkeeper.lock WHERE attempt IS NOT NULL OR expires > 0)";
    eventually("nothing is left behind", || async { number(&server, rows) == 0 }).await;
}

/// Every `PARALLEL`th point, and how many of them there are.
async fn break_every_nth(
    way: Way,
    run: u64,
    fault: fn(At) -> Fault,
    server: &Server,
    other: &Arc<dyn Store>,
) -> u64 {
    let (x, y) = (format!("x{run}"), format!("y{run}"));
    let mut last = None;
    every_point(300, async |turn| {
        let n = (turn - 1) * PARALLEL + run + 1;
        let road = Road::build(way, server.addr()).await;
        let before = road.proxy.count().requests;
        let injected = road.proxy.inject(fault(Fault::at_request(n)));
        story(road.entry(way), other, [&x, &y]).await;
        let grant = take(other, &request(&x)).await;
        assert!(Some(grant.fence) > last, "the fence went back");
        last = Some(grant.fence);
        give_back(other, &grant.key).await;
        assert_eq!(road.proxy.trouble(), None, "what is not understood is not counted");
        // A goodbye has no answer that could be cut off: the fault does not fire there, and the story goes on.
        injected.fired() || road.proxy.count().requests - before >= n
    })
    .await
}

const CUT: &str = "answered, and cut before the reply";
const RESET: &str = "reset before the request is passed on";
const HELD: &str = "held for ever";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_never_comes() {
    break_everywhere(Way::Direct, CUT, At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_arrives() {
    break_everywhere(Way::Direct, RESET, At::reset).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_swallows_everything_from_a_request_on() {
    break_everywhere(Way::Direct, HELD, At::hold).await;
}

mod pooled {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_reply_that_never_comes() {
        break_everywhere(Way::BeforePooler, CUT, At::cut_before_reply).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_request_that_never_arrives() {
        break_everywhere(Way::BeforePooler, RESET, At::reset).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_network_that_swallows_everything_from_a_request_on() {
        break_everywhere(Way::BeforePooler, HELD, At::hold).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_reply_that_never_comes_to_the_pooler() {
        break_everywhere(Way::BehindPooler, CUT, At::cut_before_reply).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_request_of_the_pooler_that_never_arrives() {
        break_everywhere(Way::BehindPooler, RESET, At::reset).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_network_that_swallows_everything_of_the_pooler() {
        break_everywhere(Way::BehindPooler, HELD, At::hold).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_twice_would_be_harmless() {
    // No network does this to a connection; a retry does. The functions must not mind.
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
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
async fn a_grant_that_was_released_meanwhile() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await.unwrap(), open(server.addr()).await.unwrap());
    laws::unknown::a_grant_that_was_released_meanwhile_is_not_reported(&store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_stays_of_requests_without_a_reply() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let (store, other) = (open(proxy.addr()).await.unwrap(), open(server.addr()).await.unwrap());
    laws::unknown::renewals_without_a_reply_are_unknown(&proxy, &store).await;
    laws::unknown::an_unknown_request_leaves_nothing(&proxy, &store, &other).await;
    laws::unknown::a_release_that_was_given_up_leaves_nothing(&proxy, &store, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_ends_during_an_outage() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let (store, other) = (open(proxy.addr()).await.unwrap(), open(server.addr()).await.unwrap());
    laws::unknown::a_wait_that_ends_during_an_outage_leaves_nothing(&proxy, &store, &other).await;
}

/// A grant that an older connection delivered late was held without a holder for a whole ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let (store, other) = (open(proxy.addr()).await.unwrap(), open(server.addr()).await.unwrap());
    let arrived =
        laws::unknown::a_request_that_arrives_after_its_release_takes_nothing(&proxy, &store, &other).await;
    assert!(arrived, "the server has seen the late requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_clients_cost_no_more_than_declared() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let open = async |addr| try_open(&format!("{}?timeout=1s&poll=500ms&claim=3s", url(addr))).await.unwrap();
    laws::wake::dead_clients_cost_no_more_than_declared(server.addr(), Framing::Postgres, open).await;
}

/// With the claim of 5 s that is the default: it follows the ttl of 2 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_of_a_short_ttl_cost_a_ttl_and_a_poll() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let open = async |addr| try_open(&url(addr)).await.unwrap();
    let bound = Duration::from_secs(3);
    laws::wake::dead_waiters_of_a_short_ttl_cost_no_more_than(bound, server.addr(), Framing::Postgres, open)
        .await;
}

/// The database refuses requests of an older connection, at once: a process that dies after its release could not release it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_connection_takes_nothing() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let (store, other) = (open(proxy.addr()).await.unwrap(), open(server.addr()).await.unwrap());
    for (names, wait) in [(&["x"][..], Wait::No), (&["y"], Wait::Forever), (&["m", "n"], Wait::No)] {
        let asked = with(request_all(names), |request| request.wait = wait);
        let late = proxy.inject(Fault::at_request(1).hold());
        let told = soon("an answer", store.acquire(&asked)).await;
        assert!(matches!(told, Err(Error::Unknown(_))) && late.fired(), "{told:?}");
        soon("the request is released", async {
            while let Err(error) = store.release(&asked.key).await {
                assert!(matches!(error, Error::Unknown(_) | Error::Unavailable(_)), "{error}");
            }
        })
        .await;
        let before = proxy.count().replies;
        late.release();
        eventually("it arrives and is answered", || async { proxy.count().replies > before }).await;
        for one in names {
            let view = other.inspect(&laws::name(one)).await.unwrap();
            assert_eq!(view, None, "it has no holder and no waiter");
        }
    }
}
