//! Fences that are drawn at an unlucky moment.

mod common;

use common::{client_of, number, url};
use lockkeeper::Lockkeeper;
use lockkeeper_postgres::{Options, connect_to};
use lockkeeper_testkit::laws::{ask, eventually, give_back, soon, take};
use lockkeeper_testkit::servers::{self, PostgresOptions};

/// An ask draws its fence before it has the row of the lock. Meanwhile somebody shares the lock and gives it back, with a later fence:
/// that was written beside the row only, and the ask was granted with its earlier one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_held_up_has_a_later_fence_than_who_shared_meanwhile() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = client_of(&server).await;
    let first = take(&store, &ask("x")).await;
    give_back(&store, &first.claim).await;
    let mut other = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    let tx = other.transaction().await.unwrap();
    tx.batch_execute("SELECT FROM lockkeeper.lock WHERE name = 'x' FOR UPDATE").await.unwrap();
    let late = tokio::spawn(async move { take(&store, &ask("x")).await });
    eventually("it has drawn its fence, and waits for the row", || async {
        number(&server, "SELECT count(*) FROM pg_locks WHERE NOT granted") == 1
    })
    .await;
    let step = async |kind: i32, terms: &str| -> String {
        let text = format!(
            "SELECT lockkeeper.step('other', 1, 1000000, {kind}, 'x', '\\x01', 60000000, {terms}, '{{}}')"
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
    let held = take(&store, &ask("x")).await;
    give_back(&store, &held.claim).await;
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
        let next = take(&store, &ask("x")).await;
        assert!(next.fence > fence);
        give_back(&store, &next.claim).await;
    }
}
