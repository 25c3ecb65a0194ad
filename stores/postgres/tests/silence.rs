//! Processes that said nothing for longer than their claim, and are back.

mod common;

use common::{number, open, sql, url};
use lockkeeper_testkit::laws::{ask, eventually, give_back, granted, stand_in_line, take};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions};

/// The place of a silent process is lost. When it is back, another of its tasks may come to stand in line before anybody looks: then
/// the process was known as if it had never been away, and whoever had lost its place waited for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_lost_the_place_asks_again_though_another_task_was_quicker() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let store = open(&format!("{}?timeout=1s&poll=100ms&claim=1s", url(proxy.addr()))).await;
    let other = open(&url(server.addr())).await;
    let (held, next) = (take(&other, &ask("x")).await, take(&other, &ask("y")).await);
    let waiter = stand_in_line(&store, &ask("x"), 1).await;
    proxy.cut_all();
    eventually("its claim is over", || async {
        number(&server, "SELECT count(*) FROM lockkeeper.client WHERE gone > lockkeeper.us()") == 0
    })
    .await;
    give_back(&other, &held.claim).await;
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.waiter"), 0, "it is thought to be there");
    // What another task of the same process says first when it is back.
    let quicker = "SELECT lockkeeper.step(id, epoch, 60000000, 1, 'y', '\\x01', 60000000, NULL, '{}') FROM lockkeeper.client";
    assert!(sql(&server, quicker).contains("waits"));
    proxy.heal();
    give_back(&store, &granted(waiter).await.claim).await;
    give_back(&other, &next.claim).await;
}

/// What an older connection brings late stands in no line, also if the process never stood in one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_older_connection_still_brings_is_refused() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let store = open(&format!("{}?timeout=1s", url(proxy.addr()))).await;
    let held = take(&store, &ask("x")).await;
    proxy.cut_all();
    proxy.heal();
    eventually("it is back", || async { store.renew(std::slice::from_ref(&held)).await.is_ok() }).await;
    let late = "SELECT lockkeeper.step(id, 1, 60000000, 1, 'x', '\\x01', 60000000, NULL, '{}') FROM lockkeeper.client";
    assert_eq!(sql(&server, late), r#"{"refused": "stale"}"#);
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.waiter"), 0);
    give_back(&store, &held.claim).await;
}
