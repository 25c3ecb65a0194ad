//! Prepared statements: the server parses a statement once for many calls, and a worker goes on when the server has dropped or changed it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper::jobs::Jobs;
use lockkeeper_testkit::servers;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::common::{Database, LONG, open_at};

/// A part of the claim that every text of it has once.
const CLAIM: &[u8] = b"FOR UPDATE OF t SKIP LOCKED";

/// Counts the texts of claims that pass.
async fn counting(server: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, count) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counter = count.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(server).await.unwrap();
            let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            let counter = counter.clone();
            tokio::spawn(async move {
                // A statement is far shorter than this, and the client writes it at once.
                let mut bytes = vec![0; 1 << 16];
                while let Ok(n @ 1..) = from_client.read(&mut bytes).await {
                    let found = bytes[..n].windows(CLAIM.len()).filter(|part| *part == CLAIM).count();
                    counter.fetch_add(found, Ordering::Relaxed);
                    if to_server.write_all(&bytes[..n]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (addr, count)
}

/// Claims and completes one job after the other.
async fn work(jobs: &Jobs, rounds: usize) {
    for _ in 0..rounds {
        let job = jobs.claim(1).await.unwrap().pop().expect("one is due");
        job.complete().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_parses_a_claim_once_for_many_calls_and_each_time_behind_a_pooler() {
    let Some(db) = Database::start().await else { return };
    let Ok(pooler) = servers::pgbouncer(db.server.addr()) else { return };
    drop(db.jobs(80, LONG).await);
    for (server, pooled) in [(db.server.addr(), false), (pooler.addr(), true)] {
        let (addr, texts) = counting(server).await;
        let jobs = open_at(&format!("postgres://postgres@{addr}/{}", db.name), "work", LONG).await;
        work(&jobs, 40).await;
        let texts = texts.load(Ordering::Relaxed);
        // Plans are renewed after some seconds, and the machine may be slow.
        assert!(if pooled { texts == 40 } else { texts <= 20 }, "{texts} texts, behind a pooler: {pooled}");
    }
}

/// Two tables with the same key, so that a statement of one would run for the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_two_tables_share_the_sessions_of_a_pooler() {
    let Some(db) = Database::start().await else { return };
    let Ok(pooler) = servers::pgbouncer(db.server.addr()) else { return };
    let mut workers = Vec::new();
    for (table, rows) in [("one", 40), ("two", 60)] {
        db.sql(&format!("CREATE TABLE {table} (id int PRIMARY KEY)")).await;
        db.install(table).await;
        db.sql(&format!("INSERT INTO {table} SELECT generate_series(1, {rows})")).await;
        for _ in 0..4 {
            let jobs =
                open_at(&format!("postgres://postgres@{}/{}", pooler.addr(), db.name), table, LONG).await;
            workers.push((
                table,
                tokio::spawn(async move {
                    let mut keys = Vec::new();
                    loop {
                        let batch = jobs.claim(3).await.unwrap();
                        if batch.is_empty() {
                            return keys;
                        }
                        keys.extend(batch.iter().map(|job| job.key().to_owned()));
                        for end in jobs.complete_all(batch).await {
                            end.unwrap();
                        }
                    }
                }),
            ));
        }
    }
    let (mut done, mut count) = (BTreeSet::new(), 0);
    for (table, worker) in workers {
        let keys = worker.await.unwrap();
        count += keys.len();
        done.extend(keys.into_iter().map(|key| (table, key)));
    }
    assert_eq!((count, done.len()), (100, 100), "a row was claimed twice, or not at all");
    for (table, rows) in [("one", 40), ("two", 60)] {
        let sql = format!("SELECT count(*) FROM {table} WHERE lk_state = 'done' AND lk_attempts = 1");
        assert_eq!(db.number(&sql).await, rows, "{table}");
    }
}

/// PostgreSQL refuses a prepared statement whose result has other types than before ("cached plan must not change result type").
#[tokio::test]
async fn a_change_of_the_table_does_not_stop_a_worker() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(20, LONG).await;
    for change in [
        "ALTER TABLE work ALTER COLUMN lk_state TYPE varchar(20)",
        "ALTER TABLE work ALTER COLUMN id TYPE bigint",
        "ALTER TABLE work DROP COLUMN note",
        "ALTER TABLE work ALTER COLUMN lk_state TYPE text",
    ] {
        work(&jobs, 4).await;
        db.sql(change).await;
    }
    work(&jobs, 4).await;
    assert_eq!(db.number("SELECT count(*) FROM work WHERE lk_state = 'done' AND lk_attempts = 1").await, 20);
}

#[tokio::test]
async fn a_server_that_drops_prepared_statements_does_not_stop_a_worker() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(12, LONG).await;
    work(&jobs, 4).await;
    db.sql(
        "CREATE FUNCTION drop_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN EXECUTE 'DEALLOCATE ALL'; RETURN NULL; END $$; \
         CREATE TRIGGER t AFTER UPDATE ON work FOR EACH STATEMENT EXECUTE FUNCTION drop_all()",
    )
    .await;
    // One behind the other, so that the second prepared one is sent soon after the first one has dropped it.
    let mut claimed = Vec::new();
    for _ in 0..8 {
        claimed.extend(jobs.claim(1).await.unwrap());
    }
    for job in claimed {
        job.complete().await.unwrap();
    }
    assert_eq!(db.number("SELECT count(*) FROM work WHERE lk_state = 'done' AND lk_attempts = 1").await, 12);
}

#[tokio::test]
async fn a_worker_whose_connection_was_ended_prepares_again() {
    let Some(db) = Database::start().await else { return };
    let (addr, texts) = counting(db.server.addr()).await;
    drop(db.jobs(60, LONG).await);
    let jobs = open_at(&format!("postgres://postgres@{addr}/{}", db.name), "work", LONG).await;
    work(&jobs, 4).await;
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() \
               AND pid <> pg_backend_pid() AND query LIKE '%lk_fence%'";
    assert!(db.number(end).await > 0, "the worker's session was not found");
    let before = texts.load(Ordering::Relaxed);
    let mut claimed = 0;
    while claimed < 40 {
        if let Ok(batch) = jobs.claim(1).await {
            claimed += batch.len();
            for end in jobs.complete_all(batch).await {
                end.unwrap();
            }
        }
    }
    let texts = texts.load(Ordering::Relaxed) - before;
    assert!((2..=20).contains(&texts), "{texts} texts of 40 claims");
}

/// With statistics of before the rows came, the planner would expect few rows, and read and sort all that are due for each claim.
#[tokio::test]
async fn a_claim_of_a_table_that_was_just_filled_reads_the_rows_that_it_takes() {
    let Some(db) = Database::start().await else { return };
    let jobs = db.jobs(20_000, LONG).await;
    assert_eq!(jobs.claim(20).await.unwrap().len(), 20);
    // The counters arrive when the session has ended, at the latest.
    drop(jobs);
    let read = "SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_user_indexes WHERE relname = 'work' \
                AND indexrelname <> 'work_pkey'";
    let mut rows = 0;
    while rows == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        rows = db.number(read).await;
    }
    assert!(rows < 1000, "a claim of 20 jobs read {rows} rows");
}
