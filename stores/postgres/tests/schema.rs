//! The tables and keys of the store: made by several processes at once, restored, and beside names that look like them.

mod common;

use std::time::Duration;

use common::{ask_for, number, open, sql, try_open, try_sql, url};
use futures_util::future::join_all;
use lockkeeper::Lockkeeper;
use lockkeeper_postgres::tokio_postgres::{self, NoTls};
use lockkeeper_testkit::laws::{give_back, is_free, request, soon, take};
use lockkeeper_testkit::servers::{self, PostgresOptions};

/// Eight processes that open a new store at once: six failed with a unique violation, because each session remembered from before it
/// waited that the schema was not there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_several_open_first_is_made_once() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    for round in 0..3 {
        let url = format!("{}?schema=locks_{round}&timeout=20s", url(server.addr()));
        let opened = join_all((0..8).map(|_| try_open(&url))).await;
        for store in opened {
            let store = store.unwrap_or_else(|error| panic!("round {round}: {error}"));
            is_free(&store, "x").await;
        }
    }
}

/// A plain dump that is restored over the tables wrote a second row into `state`; every statement that reads its one row failed then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restored_state_row_does_not_stop_the_locks() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = open(&url(server.addr())).await;
    let again = "INSERT INTO lockkeeper.state(watched_until, swept_at) SELECT watched_until, swept_at FROM lockkeeper.state";
    assert!(try_sql(&server, again).unwrap_err().contains("duplicate key"));
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.state"), 1);
    let grant = take(&store, &request("x")).await;
    give_back(&store, &grant.key).await;
}

/// Transactions of the user's hold locks called `fence` and `record count`. Their advisory keys were those of the fence counter and
/// of a record: grants drew fences past the counter, and writes of the record waited for the transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_shares_its_advisory_key_with_nothing_else() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = url(server.addr());
    let (store, keeper) = (open(&url).await, Lockkeeper::open(&url).await.unwrap());
    let stream = tokio::net::TcpStream::connect(server.addr()).await.unwrap();
    let config: tokio_postgres::Config = "user=postgres dbname=postgres".parse().unwrap();
    let (mut client, connection) = config.connect_raw(stream, NoTls).await.unwrap();
    tokio::spawn(connection);
    let transaction = client.transaction().await.unwrap();
    keeper.in_transaction(&transaction, "fence").await.unwrap();
    keeper.in_transaction(&transaction, "record count").await.unwrap();
    // The counter is behind the clock: the next grant has to set it.
    sql(&server, "SELECT setval('lockkeeper.fence', 1)");
    let grant = take(&store, &ask_for("orders/42", Duration::from_secs(60))).await;
    assert!(number(&server, "SELECT last_value FROM lockkeeper.fence") >= grant.fence.get() as i64);
    let register = keeper.register::<u32>("count");
    soon("the record is written", register.update(|value| value.unwrap_or(0) + 1)).await.unwrap();
    transaction.commit().await.unwrap();
}
