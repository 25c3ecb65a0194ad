//! Real dumps that are restored, and tables that are dropped under those who use them. What was granted meanwhile is forgotten,
//! which is declared; a fence never goes back, and nobody has to start again.

mod common;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Client, ask_for, client_of, open, sql, url};
use lockkeeper_core::{Acquired, Error, Renewal, Wait};
use lockkeeper_testkit::laws::{
    ask, eventually, give_back, granted, refused, soon, stand_in_line, take, with,
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
    let held = take(&old, &ask("held")).await;
    let back = take(&old, &ask("back")).await;
    let path = dump(&server, "custom");
    give_back(&old, &back.claim).await;
    for _ in 0..50 {
        let passing = take(&old, &ask("late")).await;
        give_back(&old, &passing.claim).await;
    }
    let late = take(&old, &ask("late")).await;
    sql(&server, "CREATE DATABASE again");
    run(&server, "pg_restore", &["-d", "again", "--exit-on-error", &path]).unwrap();
    let (a, b) = (open(&again(&server)).await, open(&again(&server)).await);
    // What is in the dump holds on, also what was given back since.
    refused(&a, &ask("held")).await;
    refused(&a, &ask("back")).await;
    assert_eq!(a.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Renewed]);
    // What is not in it is forgotten, and the fence tells: for that name, and for any other.
    let next = take(&a, &ask("late")).await;
    assert!(next.fence > late.fence, "{} after {}", next.fence, late.fence);
    assert!(take(&b, &ask("new")).await.fence > next.fence);
    // Lines and messages are as before.
    let waiter = stand_in_line(&b, &ask("held"), 1).await;
    give_back(&a, &held.claim).await;
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
                        .acquire(&with(ask_for(&name, Duration::from_secs(1)), |ask| ask.wait = wait))
                        .await
                    {
                        Ok(Acquired::Granted(grant)) => {
                            assert!(
                                Some(grant.fence) > last,
                                "the fence went back: {} after {last:?}",
                                grant.fence
                            );
                            last = Some(grant.fence);
                            done[nth].fetch_add(1, Ordering::Relaxed);
                            passing(store.release(&grant.claim).await.map(drop)).await;
                        }
                        Ok(Acquired::Busy(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
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
        eventually("everybody goes on without a restart", || async {
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

/// What may be said while somebody works on the tables: try again.
async fn passing(said: Result<(), Error>) {
    match said {
        Ok(()) => {}
        Err(Error::Unavailable(_) | Error::Unknown(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
        Err(error) => panic!("no reason to give up: {error:?}"),
    }
}

/// What somebody does to the tables while others use them. The server ends one of two that wait for each other: again, then.
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
    let held = take(&a, &ask("x")).await;
    let waiter = stand_in_line(&b, &ask("x"), 1).await;
    until_done(|| run(&server, "psql", &["-d", "postgres", "-qXc", what]));
    workers.go_on().await;
    served_anew(&a, &held, waiter).await;
    workers.end().await;
}

/// The holder learns that it is over, the one who waits is served, and the fence tells the two apart.
async fn served_anew(
    holder: &Client,
    held: &lockkeeper_core::Grant,
    waiter: JoinHandle<lockkeeper_core::Result<Acquired>>,
) {
    assert!(granted(waiter).await.fence > held.fence);
    assert_eq!(holder.renew(std::slice::from_ref(held)).await.unwrap(), [Renewal::Lost]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_that_is_dropped_in_use_is_made_again() {
    dropped_in_use("DROP SCHEMA lockkeeper CASCADE").await;
}

/// The version of the schema is there and its table is not: nobody makes it again, also not whoever opens the store anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_dropped_in_use_is_made_again() {
    dropped_in_use("DROP TABLE lockkeeper.lock CASCADE").await;
}

/// Making what is missing locks the tables, and the statements of other clients lock them in another order: PostgreSQL ends one of the
/// two. If it ended the repair, the client that needed it got an error, such as a holder for its renewal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_among_busy_clients_is_tried_again_after_a_deadlock() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sql(&server, "ALTER SYSTEM SET deadlock_timeout = '20ms'");
    sql(&server, "SELECT pg_reload_conf()");
    let holder = client_of(&server).await;
    let held = take(&holder, &ask("x")).await;
    let workers = Workers::start_on(&url(server.addr()), |_| "hot".into(), Wait::Forever).await;
    workers.go_on().await;
    for _ in 0..60 {
        // Only the holder calls this function, so only the holder repairs.
        let drop = ["-d", "postgres", "-qXc", "DROP FUNCTION lockkeeper.extend(text, bytea)"];
        until_done(|| run(&server, "psql", &drop));
        let renewed = holder.renew(std::slice::from_ref(&held)).await;
        assert_eq!(renewed.unwrap(), [Renewal::Renewed]);
    }
    workers.end().await;
}
