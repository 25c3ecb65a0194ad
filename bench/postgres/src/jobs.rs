//! Workers that share the rows of a table: claimed by batch, one by one, and with a lock per row.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper::jobs::{ExistingRows, JobTable, Jobs, install};
use lockkeeper_core::{AcquireOutcome, Attempt, Holder, LockName, LockRequest, Locks};
use lockkeeper_postgres::{Options, PostgresStore};

use crate::{bare, median};

const WORKERS: usize = 8;
const ROWS: i32 = 2000;
const GOAL: f64 = 2.0;

pub async fn run(addr: SocketAddr, rounds: usize) {
    let mut client = bare::connect(addr).await;
    let tables = "CREATE TABLE jobs (id int PRIMARY KEY); CREATE TABLE plain_jobs (id int PRIMARY KEY, done bool NOT NULL DEFAULT false); CREATE INDEX ON plain_jobs (id) WHERE NOT done";
    client.batch_execute(tables).await.expect("tables");
    let table = JobTable::find(&mut client, "jobs").await.expect("the table");
    install(&mut client, &table, ExistingRows::Open).await.expect("the columns");
    let (mut by_lock, mut one_by_one, mut piped, mut by_batch) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let fill = format!(
            "TRUNCATE jobs, plain_jobs; INSERT INTO jobs SELECT generate_series(1, {ROWS}); \
             INSERT INTO plain_jobs SELECT generate_series(1, {ROWS})"
        );
        client.batch_execute(&fill).await.expect("rows");
        by_lock.push(rate(|n| with_locks(addr, n)).await);
        one_by_one.push(rate(|_| with_claims(addr, 1, false)).await);
        let refill = format!("TRUNCATE jobs; INSERT INTO jobs SELECT generate_series(1, {ROWS})");
        client.batch_execute(&refill).await.expect("rows");
        piped.push(rate(|_| with_claims(addr, 20, false)).await);
        client.batch_execute(&refill).await.expect("rows");
        by_batch.push(rate(|_| with_claims(addr, 20, true)).await);
    }
    // Each round beside its neighbour: what else the machine does hits both.
    let ratio = |ours: &[f64]| {
        median(ours.iter().zip(&by_lock).map(|(ours, other)| ours / other).collect::<Vec<f64>>())
    };
    println!("jobs, {WORKERS} workers, {ROWS} rows: a lock per row {:.0}/s", median(by_lock.clone()));
    for (how, ours, goal) in [
        ("one by one", one_by_one, 1.0),
        ("by batches of 20, each end a statement", piped, 1.0),
        ("by batches of 20, their ends one statement", by_batch, GOAL),
    ] {
        let ratio = ratio(&ours);
        println!("  claimed {how} {:.0}/s: ratio {ratio:.2} (goal: at least {goal})", median(ours));
    }
}

/// Rows per second of all workers together.
async fn rate<F: Future<Output = (usize, Duration)> + Send + 'static>(work: impl Fn(usize) -> F) -> f64 {
    let workers: Vec<_> = (0..WORKERS).map(|n| tokio::spawn(work(n))).collect();
    let (mut rows, mut longest) = (0, Duration::ZERO);
    for worker in workers {
        let (done, took) = worker.await.expect("the worker ends well");
        (rows, longest) = (rows + done, longest.max(took));
    }
    assert_eq!(rows, ROWS as usize, "each row is done once");
    rows as f64 / longest.as_secs_f64()
}

/// Claims and completes until there are no more. The connection is not part of the measurement.
async fn with_claims(addr: SocketAddr, batch: usize, together: bool) -> (usize, Duration) {
    let jobs =
        Jobs::open(&format!("postgres://postgres@{addr}/postgres"), "jobs").await.expect("a job table");
    let (began, mut done) = (Instant::now(), 0);
    loop {
        let claimed = jobs.claim(batch).await.expect("an answer");
        if claimed.is_empty() {
            return (done, began.elapsed());
        }
        done += claimed.len();
        // The work would be here.
        let ends = match together {
            true => jobs.complete_all(claimed).await,
            false => futures_util::future::join_all(claimed.into_iter().map(|job| job.complete())).await,
        };
        for end in ends {
            end.expect("it is recorded");
        }
    }
}

/// The same with a lock per row, as a program would have it: read some open rows by an index, and for each one that is free take the lock,
/// look again, write, give back. No renewal, no count of attempts, no back-off: the least that is correct.
async fn with_locks(addr: SocketAddr, worker: usize) -> (usize, Duration) {
    let options = Options::from_url(&format!("postgres://postgres@{addr}/postgres")).expect("an address");
    let (store, client) = (PostgresStore::open(options).await.expect("a store"), bare::connect(addr).await);
    let holder = Arc::new(Holder::new("bench", 1, None).expect("a holder"));
    // Each worker begins at another place, so that they seldom meet.
    let list = "SELECT id FROM plain_jobs WHERE NOT done AND id > $1 ORDER BY id LIMIT 20";
    let list = client.prepare(list).await.expect("a statement");
    let mut after = worker as i32 * ROWS / WORKERS as i32;
    let look = client.prepare("SELECT done FROM plain_jobs WHERE id = $1").await.expect("a statement");
    let write = client.prepare("UPDATE plain_jobs SET done = true WHERE id = $1").await.expect("a statement");
    let (began, mut done) = (Instant::now(), 0);
    loop {
        let rows = client.query(&list, &[&after]).await.expect("rows");
        if rows.is_empty() && after == 0 {
            return (done, began.elapsed());
        }
        after = 0;
        for row in rows {
            let id: i32 = row.get(0);
            after = id;
            let name = LockName::new(format!("job/{id}")).expect("a name");
            let attempt = Attempt::from_bytes(lockkeeper_host::random_128());
            let request = LockRequest::new(attempt, name, Duration::from_secs(30), holder.clone());
            let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request).await else { continue };
            if !client.query_one(&look, &[&id]).await.expect("a row").get::<_, bool>(0) {
                client.execute(&write, &[&id]).await.expect("an update");
                done += 1;
            }
            store.release(&grant.key).await.expect("an answer");
        }
    }
}
