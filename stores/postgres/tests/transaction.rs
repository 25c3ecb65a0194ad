//! Locks for transactions, and conditional writes that need none.

mod common;

use std::time::Duration;

use common::{ask_for, client_of, number, sql, url};
use lockkeeper::Lockkeeper;
use lockkeeper_core::{AcquireOutcome, Error, Fence, Outcome, Wait};
use lockkeeper_postgres::plain::{self, VersionedTable};
use lockkeeper_postgres::tokio_postgres::{self, Client, IsolationLevel, NoTls};
use lockkeeper_postgres::{Options, PostgresStore};
use lockkeeper_testkit::laws::{give_back, refused, request, soon, take, with};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// A connection of the user's own.
async fn connect(server: &Server) -> Client {
    let stream = tokio::net::TcpStream::connect(server.addr()).await.unwrap();
    let config: tokio_postgres::Config = "user=postgres dbname=postgres".parse().unwrap();
    let (client, connection) = config.connect_raw(stream, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn keeper(server: &Server) -> Lockkeeper {
    Lockkeeper::open(&url(server.addr())).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_the_fence_and_the_work_are_one_transaction() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (keeper, leases) = (keeper(&server).await, client_of(&server).await);
    let mut db = connect(&server).await;
    db.batch_execute("CREATE TABLE work(fence bigint)").await.unwrap();
    let before = take(&leases, &request("x")).await;
    // Held by a lease: the transaction gets Busy, and can go on.
    let tx = db.transaction().await.unwrap();
    match keeper.in_transaction(&tx, "x").await {
        Err(Error::Busy(busy)) => assert_eq!(busy.held[0].fence, before.fence),
        other => panic!("it is held: {other:?}"),
    }
    tx.execute("INSERT INTO work VALUES (1)", &[]).await.unwrap();
    tx.commit().await.unwrap();
    give_back(&leases, &before.key).await;
    // Rolled back: as if nothing had been.
    let tx = db.transaction().await.unwrap();
    let undone = keeper.in_transaction(&tx, "x").await.unwrap();
    assert!(undone > before.fence);
    refused(&leases, &request("x")).await;
    tx.execute("INSERT INTO work VALUES (2)", &[]).await.unwrap();
    tx.rollback().await.unwrap();
    // Committed; the waiter for a lease is granted the lock after that.
    let tx = db.transaction().await.unwrap();
    let done = keeper.in_transaction(&tx, "x").await.unwrap();
    assert!(done > undone);
    let (leases2, patient) = (leases.clone(), with(request("x"), |request| request.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { leases2.acquire(&patient).await });
    tx.execute("INSERT INTO work VALUES ($1)", &[&(done.get() as i64)]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiter.is_finished(), "two hold it");
    tx.commit().await.unwrap();
    match soon("the waiter is let in", waiter).await.unwrap() {
        Ok(AcquireOutcome::Granted(next)) => assert!(next.fence > done),
        other => panic!("the transaction is over: {other:?}"),
    }
    assert_eq!(number(&server, "SELECT count(*) FROM work"), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_wait_for_each_other_and_lose_no_count() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let keeper = keeper(&server).await;
    sql(&server, "CREATE TABLE counter(n bigint); INSERT INTO counter VALUES (0)");
    let mut workers = Vec::new();
    for _ in 0..4 {
        let (keeper, mut db) = (keeper.clone(), connect(&server).await);
        workers.push(tokio::spawn(async move {
            let mut fences = Vec::new();
            for _ in 0..25 {
                let tx = db.transaction().await.unwrap();
                fences.push(keeper.in_transaction(&tx, "counter").await.unwrap());
                let n: i64 = tx.query_one("SELECT n FROM counter", &[]).await.unwrap().get(0);
                tokio::task::yield_now().await;
                tx.execute("UPDATE counter SET n = $1", &[&(n + 1)]).await.unwrap();
                tx.commit().await.unwrap();
            }
            fences
        }));
    }
    let mut all: Vec<Fence> = Vec::new();
    for worker in workers {
        let fences = soon("the counting ends", worker).await.unwrap();
        assert!(fences.is_sorted());
        all.extend(fences);
    }
    all.sort();
    all.dedup();
    assert_eq!((all.len(), number(&server, "SELECT n FROM counter")), (100, 100));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_and_a_transaction_never_hold_together() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (keeper, leases) = (keeper(&server).await, client_of(&server).await);
    sql(&server, "CREATE TABLE seen(who text)");
    let (mut db, other) = (connect(&server).await, connect(&server).await);
    let transactions = tokio::spawn(async move {
        let mut count = 0;
        while count < 30 {
            let tx = db.transaction().await.unwrap();
            if keeper.in_transaction(&tx, "x").await.is_ok() {
                count += 1;
                // A holder of a lease would write here meanwhile.
                let before: i64 = tx.query_one("SELECT count(*) FROM seen", &[]).await.unwrap().get(0);
                tokio::time::sleep(Duration::from_millis(5)).await;
                let after: i64 = tx.query_one("SELECT count(*) FROM seen", &[]).await.unwrap().get(0);
                assert_eq!(before, after, "a lease was given meanwhile");
            }
            tx.commit().await.unwrap();
        }
    });
    let mut count = 0;
    while !transactions.is_finished() || count < 10 {
        if let Ok(AcquireOutcome::Granted(held)) =
            leases.acquire(&ask_for("x", Duration::from_secs(30))).await
        {
            other.execute("INSERT INTO seen VALUES ('lease')", &[]).await.unwrap();
            count += 1;
            give_back(&leases, &held.key).await;
        }
    }
    transactions.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_isolation_and_another_store_are_refused() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let mut db = connect(&server).await;
    let keeper = keeper(&server).await;
    let tx = db.build_transaction().isolation_level(IsolationLevel::Serializable).start().await.unwrap();
    let error = keeper.in_transaction(&tx, "x").await.unwrap_err();
    common::says(&error, Outcome::Invalid, &["READ COMMITTED"]);
    tx.rollback().await.unwrap();
    let tx = db.transaction().await.unwrap();
    let memory = Lockkeeper::open("memory:").await.unwrap();
    let error = memory.in_transaction(&tx, "x").await.unwrap_err();
    common::says(&error, Outcome::Unsupported, &["postgres://"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conditional_writes_need_no_lock() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sql(
        &server,
        "CREATE TABLE account(id int PRIMARY KEY, balance bigint, version bigint); INSERT INTO account VALUES (1, 0, 0); \
         CREATE TABLE run(day text PRIMARY KEY, host text); \
         CREATE TABLE job(id int PRIMARY KEY, done bool, fence bigint); INSERT INTO job SELECT n, false, 0 FROM generate_series(1, 20) n",
    );
    // A version column: no update is lost.
    let table = VersionedTable { name: "public.account", key: "id", version: "version" };
    let mut workers = Vec::new();
    for _ in 0..4 {
        let db = connect(&server).await;
        workers.push(tokio::spawn(async move {
            for _ in 0..10 {
                let add = |row: tokio_postgres::Row| async move {
                    Ok(vec![("balance", Box::new(row.get::<_, i64>("balance") + 1) as _)])
                };
                loop {
                    match plain::update(&db, table, &1, add).await {
                        Ok(written) => break assert!(written),
                        Err(Error::Unavailable(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }));
    }
    for worker in workers {
        soon("the updates are done", worker).await.unwrap();
    }
    assert_eq!(sql(&server, "SELECT balance, version FROM account"), "40|40");
    let db = connect(&server).await;
    let missing = plain::update(&db, table, &2, |_| async { Ok(Vec::new()) }).await;
    assert!(matches!(missing, Err(Error::Invalid(_))));
    // A unique key: one is the first.
    let mut first = 0;
    for host in ["a", "b", "c"] {
        first +=
            usize::from(plain::claim(&db, "run", &[("day", &"2026-06-11"), ("host", &host)]).await.unwrap());
    }
    assert_eq!((first, sql(&server, "SELECT host FROM run").as_str()), (1, "a"));
    // A queue: each job to one worker.
    let store = PostgresStore::open(Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    let mut workers = Vec::new();
    for _ in 0..4 {
        let (store, mut db) = (store.clone(), connect(&server).await);
        workers.push(tokio::spawn(async move {
            let mut count = 0;
            loop {
                let tx = db.transaction().await.unwrap();
                let Some(job) = plain::next_job(&store, &tx, "job", "NOT done", "id").await.unwrap() else {
                    return count;
                };
                let (id, fence) = (job.row.get::<_, i32>("id"), job.fence.get() as i64);
                let done = "UPDATE job SET done = true, fence = $2 WHERE id = $1 AND fence < $2 AND NOT done";
                assert_eq!(tx.execute(done, &[&id, &fence]).await.unwrap(), 1);
                tx.commit().await.unwrap();
                count += 1;
            }
        }));
    }
    let mut count = 0;
    for worker in workers {
        count += soon("the jobs are done", worker).await.unwrap();
    }
    assert_eq!((count, number(&server, "SELECT count(DISTINCT fence) FROM job WHERE done")), (20, 20));
}
