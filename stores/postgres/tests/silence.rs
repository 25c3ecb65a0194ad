//! Processes that were silent for longer than their claim, and send requests again.

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::{number, open, sql, url};
use lockkeeper_testkit::laws::{self, eventually, give_back, granted, join_queue, request, soon, take};
use lockkeeper_testkit::proxy::{Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions};

/// A silent process loses its queue entries. When it is back, another of its tasks may enqueue before the next poll: then the process
/// was known as if it had never been silent, and the waiter that had lost its entry waited for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_lost_its_entry_enqueues_again_though_another_task_was_quicker() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let store = open(&format!("{}?timeout=1s&poll=100ms&claim=1s", url(proxy.addr()))).await;
    let other = open(&url(server.addr())).await;
    let (held, next) = (take(&other, &request("x")).await, take(&other, &request("y")).await);
    let waiter = join_queue(&store, &request("x"), 1).await;
    proxy.cut_all();
    eventually("its claim is over", || async {
        number(&server, "SELECT count(*) FROM lockkeeper.client WHERE alive_until > lockkeeper.now_us()") == 0
    })
    .await;
    give_back(&other, &held.key).await;
    assert_eq!(
        number(&server, "SELECT count(*) FROM lockkeeper.waiter"),
        0,
        "the process is considered alive"
    );
    // The first request of another task of the same process.
    let quicker = "SELECT lockkeeper.run_request(id, epoch, 60000000, 1, 'y', '\\x01', 60000000, NULL, '{}') FROM lockkeeper.client";
    assert!(sql(&server, quicker).contains("queued"));
    proxy.heal();
    give_back(&store, &granted(waiter).await.key).await;
    give_back(&other, &next.key).await;
}

/// A request that an older connection delivers late is neither granted nor enqueued, also if the process was never in a queue before: the
/// process has released it already, so the lock would be held without a holder for a whole ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_an_older_connection_is_refused() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let store = open(&format!("{}?timeout=1s", url(proxy.addr()))).await;
    let held = take(&store, &request("x")).await;
    proxy.cut_all();
    proxy.heal();
    eventually("it is back", || async { store.renew(std::slice::from_ref(&held)).await.is_ok() }).await;
    let step = |epoch: &str, kind: u8, name: &str| {
        let step = format!(
            "SELECT lockkeeper.run_request(id, {epoch}, 60000000, {kind}, '{name}', '\\x01', 60000000, NULL, '{{}}') FROM lockkeeper.client"
        );
        sql(&server, &step)
    };
    let stale = r#"{"refused": "stale"}"#;
    // The fast path applies only while the counter is ahead of the clock.
    sql(&server, "SELECT setval('lockkeeper.fence', lockkeeper.now_us() + 600000000)");
    // A lock that is held, and one that is free: by a try, an enqueue, and a woken waiter.
    for name in ["x", "free"] {
        for kind in [0, 1, 3] {
            assert_eq!(step("1", kind, name), stale, "{name} {kind}");
        }
    }
    let several = "SELECT lockkeeper.acquire(id, 1, 60000000, true, ARRAY['a', 'b'], '\\x01', 60000000, NULL, '{}') FROM lockkeeper.client";
    assert_eq!(sql(&server, several), stale);
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.waiter"), 0);
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.lock WHERE attempt = '\\x01'"), 0);
    // The request of the first waiter.
    assert!(step("epoch", 1, "x").contains("queued"));
    give_back(&store, &held.key).await;
    sql(&server, "UPDATE lockkeeper.lock SET attempt = NULL, expires = 0, free_at = 0");
    assert_eq!(step("1", 3, "x"), stale);
    assert!(step("epoch", 3, "x").parse::<u64>().is_ok(), "the newer connection is granted the lock");
}

/// The connection for notifications ended, and on the next one the server did not reply to LISTEN, as a pooler in session mode without a free
/// server process does. The process sent no poll meanwhile, which is its heartbeat, so all its waiters lost their queue entries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_reports_that_it_is_alive_while_the_server_does_not_reply_to_listen() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    // The client does not give up the silent connection within this test.
    let store = open(&format!("{}?timeout=200s&poll=100ms&claim=60s", url(proxy.addr()))).await;
    let other = open(&url(server.addr())).await;
    let held = take(&other, &request("x")).await;
    let first = join_queue(&store, &request("x"), 1).await;
    let second = join_queue(&other, &request("x"), 2).await;
    let alive =
        "FROM lockkeeper.client c JOIN lockkeeper.waiter w ON c.id = w.client ORDER BY w.position LIMIT 1";
    eventually("notifications reach the process of the first waiter", || async {
        sql(&server, &format!("SELECT listens {alive}")) == "t"
    })
    .await;
    let stuck =
        proxy.inject(Fault::at_request(1).on(Pick::sent("LISTEN lockkeeper")).and_every_later_one().hold());
    proxy.cut(Pick::sent("LISTEN lockkeeper"));
    soon("the client tries to listen", stuck.until_fired()).await;
    for _ in 0..3 {
        let until = || sql(&server, &format!("SELECT alive_until {alive}"));
        let before = until();
        eventually("the process reports that it is alive", || async { until() != before }).await;
    }
    give_back(&other, &held.key).await;
    let grant = granted(first).await;
    assert!(!second.is_finished(), "two hold the lock");
    give_back(&store, &grant.key).await;
    give_back(&other, &granted(second).await.key).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_noticed_while_callers_come_and_go() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let open = async |addr: SocketAddr| open(&format!("{}?timeout=1s", url(addr))).await;
    laws::silence::a_silent_server_is_noticed_while_callers_come_and_go(
        server.addr(),
        Framing::Postgres,
        open,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_claim_does_not_shorten_that_of_another_client() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let patient = open(&format!("{}?timeout=30s&poll=5m&claim=10m", url(proxy.addr()))).await;
    let hasty = open(&format!("{}?poll=50ms&claim=100ms", url(server.addr()))).await;
    let silence = Duration::from_secs(1);
    laws::hand_off::a_short_claim_does_not_shorten_that_of_another_client(
        &proxy,
        (&patient, &hasty),
        silence,
    )
    .await;
}
