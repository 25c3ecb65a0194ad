//! Fences under concurrency.

mod common;

use common::{client_of, number, url};
use lockkeeper::Lockkeeper;
use lockkeeper_postgres::{Options, connect_to};
use lockkeeper_testkit::laws::{eventually, give_back, request, soon, take};
use lockkeeper_testkit::servers::{self, PostgresOptions};

/// A request draws its fence before it locks the row. Meanwhile another client takes and releases a shared hold, with a later fence:
/// that was written to `hold` only, and the request was granted with its earlier fence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_request_has_a_later_fence_than_a_shared_hold_before_it() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = client_of(&server).await;
    let first = take(&store, &request("x")).await;
    give_back(&store, &first.key).await;
    let mut other = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    let tx = other.transaction().await.unwrap();
    tx.batch_execute("SELECT FROM lockkeeper.lock WHERE name = 'x' FOR UPDATE").await.unwrap();
    let late = tokio::spawn(async move { take(&store, &request("x")).await });
    eventually("the request has drawn its fence, and waits for the row", || async {
        number(&server, "SELECT count(*) FROM pg_locks WHERE NOT granted") == 1
    })
    .await;
    let step = async |kind: i32, terms: &str| -> String {
        let text = format!(
            "SELECT lockkeeper.run_request('other', 1, 1000000, {kind}, 'x', '\\x01', 60000000, {terms}, '{{}}')"
        );
        tx.query_one(&text, &[]).await.unwrap().get(0)
    };
    let shared: u64 = step(0, r#"'{"mode": -1}'"#).await.parse().unwrap();
    assert_eq!(step(2, "NULL").await, "+");
    tx.commit().await.unwrap();
    let late = soon("it is granted", late).await.unwrap();
    assert!(late.fence.get() > shared, "{} after {shared}", late.fence);
}

/// The fence of a lock may be ahead of the counter: that of a transaction is above it all the same, and so is the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_has_a_later_fence_than_the_lock_had_before() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (store, keeper) = (client_of(&server).await, Lockkeeper::open(&url(server.addr())).await.unwrap());
    let mut db = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    let held = take(&store, &request("x")).await;
    give_back(&store, &held.key).await;
    // Far enough for the clock not to catch up within this test.
    for ahead in [60_000_000_i64, 600_000_000, 1] {
        let ahead = format!(
            "UPDATE lockkeeper.lock SET fence = (SELECT last_value FROM lockkeeper.fence) + {ahead} RETURNING fence"
        );
        let last = number(&server, &ahead) as u64;
        let tx = db.transaction().await.unwrap();
        let fence = keeper.in_transaction(&tx, "x").await.unwrap();
        tx.commit().await.unwrap();
        assert!(fence.get() > last, "{fence} after {last}");
        let next = take(&store, &request("x")).await;
        assert!(next.fence > fence);
        give_back(&store, &next.key).await;
    }
}

/// While one session set the counter, another took the clock itself for its fence, which the counter did not know: after the clock was set
/// back, a lower fence followed. Every fence comes from the counter, also if the session has to wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fence_comes_from_the_counter() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let keeper = Lockkeeper::open(&url(server.addr())).await.unwrap();
    let connect = async || connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    let (mut db, setting) = (connect().await, connect().await);
    setting
        .batch_execute("BEGIN; SELECT pg_advisory_xact_lock(lockkeeper.advisory_key('fence', ''))")
        .await
        .unwrap();
    setting.batch_execute("SELECT setval('lockkeeper.fence', 1)").await.unwrap();
    let inside = tokio::spawn(async move {
        let tx = db.transaction().await.unwrap();
        keeper.in_transaction(&tx, "x").await.unwrap()
    });
    let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    eventually("it waits for the counter", || async {
        assert!(!inside.is_finished(), "its fence is not from the counter");
        number(&server, waits) == 1
    })
    .await;
    setting.batch_execute("COMMIT").await.unwrap();
    let fence = soon("it has its fence", inside).await.unwrap();
    assert!(number(&server, "SELECT last_value FROM lockkeeper.fence") as u64 >= fence.get());
}
