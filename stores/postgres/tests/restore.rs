//! Real dumps that are restored, and tables that are dropped while clients use them. Grants since the dump are forgotten,
//! which is declared; a fence never goes back, and no client has to restart.

mod common;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Client, ask_for, client_of, open, sql, url};
use lockkeeper_core::{AcquireOutcome, Error, RenewOutcome, Wait};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, join_queue, refused, request, soon, take, with,
};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};
use tokio::task::JoinHandle;

/// Runs a program of PostgreSQL's clients; says what went wrong, if anything.
fn run(server: &Server, program: &str, args: &[&str]) -> Result<(), String> {
    let (host, port) = (server.addr().ip().to_string(), server.addr().port().to_string());
    let mut command = Command::new(program);
    command.args(["-h", &host, "-p", &port, "-U", "postgres"]).args(args);
    let done = command.output().unwrap_or_else(|e| panic!("{program} runs: {e}"));
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    if done.status.success() { Ok(()) } else { Err(format!("{program} {args:?}: {said}")) }
}

/// Dumps the database in this format, and says where.
fn dump(server: &Server, format: &str) -> String {
    let path = server.place().join(&format!("dump-{format}")).display().to_string();
    run(server, "pg_dump", &["-d", "postgres", "--format", format, "-f", &path]).unwrap();
    assert!(Path::new(&path).is_file());
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_dump_in_a_new_database_goes_on_from_now() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let old = client_of(&server).await;
    let held = take(&old, &request("held")).await;
    let back = take(&old, &request("back")).await;
    let path = dump(&server, "custom");
    give_back(&old, &back.key).await;
    for _ in 0..50 {
        let passing = take(&old, &request("late")).await;
        give_back(&old, &passing.key).await;
    }
    let late = take(&old, &request("late")).await;
    sql(&server, "CREATE DATABASE again");
    run(&server, "pg_restore", &["-d", "again", "--exit-on-error", &path]).unwrap();
    let (a, b) = (open(&again(&server)).await, open(&again(&server)).await);
    // Holds in the dump are held, also those that were released since.
    refused(&a, &request("held")).await;
    refused(&a, &request("back")).await;
    assert_eq!(a.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    // Grants that are not in it are forgotten, and the fence shows it: for that name, and for any other.
    let next = take(&a, &request("late")).await;
    assert!(next.fence > late.fence, "{} after {}", next.fence, late.fence);
    assert!(take(&b, &request("new")).await.fence > next.fence);
    // Queues and notifications work as before.
    let waiter = join_queue(&b, &request("held"), 1).await;
    give_back(&a, &held.key).await;
    assert!(granted(waiter).await.fence > next.fence);
}

fn again(server: &Server) -> String {
    format!("postgres://postgres@{}/again", server.addr())
}

/// Clients that take and give back, each a name of its own, whatever happens to the tables meanwhile.
struct Workers {
    done: Arc<[AtomicUsize; 3]>,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Workers {
    async fn start(url: &str) -> Workers {
        Workers::start_on(url, |nth| format!("work/{nth}"), Wait::No).await
    }

    async fn start_on(url: &str, name: impl Fn(usize) -> String, wait: Wait) -> Workers {
        let (done, stop) = (Arc::<[AtomicUsize; 3]>::default(), Arc::<AtomicBool>::default());
        let mut tasks = Vec::new();
        for nth in 0..done.len() {
            let (store, done, stop) = (open(url).await, done.clone(), stop.clone());
            let (name, mut last) = (name(nth), None);
            tasks.push(tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    // Forgotten or not: its name is free a second later.
                    match store
                        .acquire(&with(ask_for(&name, Duration::from_secs(1)), |request| request.wait = wait))
                        .await
                    {
                        Ok(AcquireOutcome::Granted(grant)) => {
                            assert!(
                                Some(grant.fence) > last,
                                "the fence went back: {} after {last:?}",
                                grant.fence
                            );
                            last = Some(grant.fence);
                            done[nth].fetch_add(1, Ordering::Relaxed);
                            passing(store.release(&grant.key).await.map(drop)).await;
                        }
                        Ok(AcquireOutcome::Busy(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
                        Err(error) => passing(Err(error)).await,
                    }
                }
            }));
        }
        Workers { done, stop, tasks }
    }

    /// All of them get their locks, again and again.
    async fn go_on(&self) {
        let so_far = self.done.each_ref().map(|done| done.load(Ordering::Relaxed));
        eventually("all clients go on without a restart", || async {
            self.tasks.iter().any(JoinHandle::is_finished)
                || self
                    .done
                    .iter()
                    .zip(so_far)
                    .all(|(done, before)| done.load(Ordering::Relaxed) >= before + 20)
        })
        .await;
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            soon("the work ends", task).await.unwrap();
        }
    }
}

/// The errors that are allowed while the tables change: try again.
async fn passing(said: Result<(), Error>) {
    match said {
        Ok(()) => {}
        Err(Error::Unavailable(_) | Error::Unknown(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
        Err(error) => panic!("no reason to give up: {error:?}"),
    }
}

/// A change of the tables while clients use them. The server ends one of two that deadlock: then the change is tried again.
fn until_done(what: impl Fn() -> Result<(), String>) {
    let told = tokio::task::block_in_place(|| {
        let deadlock =
            |told: &Result<(), String>| matches!(told, Err(text) if text.contains("deadlock detected"));
        (0..20).map(|_| what()).find(|told| !deadlock(told))
    });
    told.expect("not a deadlock each time").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_is_restored_over_tables_in_use() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let workers = Workers::start(&url(server.addr())).await;
    let (custom, plain) = (dump(&server, "custom"), dump(&server, "plain"));
    workers.go_on().await;
    let whole = ["-d", "postgres", "--clean", "--if-exists", "--single-transaction", &custom];
    until_done(|| run(&server, "pg_restore", &whole));
    workers.go_on().await;
    let drop = "DROP SCHEMA lockkeeper CASCADE";
    let whole =
        ["-d", "postgres", "-qX", "-v", "ON_ERROR_STOP=1", "--single-transaction", "-c", drop, "-f", &plain];
    until_done(|| run(&server, "psql", &whole));
    workers.go_on().await;
    workers.end().await;
}

/// Drops something under clients that work, one that holds and one that waits.
async fn dropped_in_use(what: &str) {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (a, b) = (client_of(&server).await, client_of(&server).await);
    let workers = Workers::start(&url(server.addr())).await;
    workers.go_on().await;
    let held = take(&a, &request("x")).await;
    let waiter = join_queue(&b, &request("x"), 1).await;
    until_done(|| run(&server, "psql", &["-d", "postgres", "-qXc", what]));
    workers.go_on().await;
    served_anew(&a, &held, waiter).await;
    workers.end().await;
}

/// The holder learns that it is over, the waiter is granted the lock, and the fence tells the two apart.
async fn served_anew(
    holder: &Client,
    held: &lockkeeper_core::Grant,
    waiter: JoinHandle<lockkeeper_core::Result<AcquireOutcome>>,
) {
    assert!(granted(waiter).await.fence > held.fence);
    assert_eq!(holder.renew(std::slice::from_ref(held)).await.unwrap(), [RenewOutcome::Lost]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_that_is_dropped_in_use_is_created_again() {
    dropped_in_use("DROP SCHEMA lockkeeper CASCADE").await;
}

/// The version of the schema is there and its table is not: no client created it again, nor did one that opened the store anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_dropped_in_use_is_created_again() {
    dropped_in_use("DROP TABLE lockkeeper.lock CASCADE").await;
}

/// Creating what is missing locks the tables, and the statements of other clients lock them in another order: PostgreSQL ends one of the
/// two. If it ended the repair, the client that needed it got an error, such as a holder for its renewal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_among_busy_clients_is_tried_again_after_a_deadlock() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sql(&server, "ALTER SYSTEM SET deadlock_timeout = '20ms'");
    sql(&server, "SELECT pg_reload_conf()");
    let holder = client_of(&server).await;
    let held = take(&holder, &request("x")).await;
    let workers = Workers::start_on(&url(server.addr()), |_| "hot".into(), Wait::Forever).await;
    workers.go_on().await;
    for _ in 0..60 {
        // Only the holder calls this function, so only the holder repairs.
        let drop = ["-d", "postgres", "-qXc", "DROP FUNCTION lockkeeper.renew(text, bytea)"];
        until_done(|| run(&server, "psql", &drop));
        let renewed = holder.renew(std::slice::from_ref(&held)).await;
        assert_eq!(renewed.unwrap(), [RenewOutcome::Renewed]);
    }
    workers.end().await;
}
