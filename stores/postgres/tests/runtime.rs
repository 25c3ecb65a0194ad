//! A store whose connections are on the runtime that opened it.

mod common;

use std::time::Duration;

use common::{client_of, number, open, refused_at_open, says, url};
use lockkeeper_core::{AcquireOutcome, Error, Outcome, ReleaseOutcome, RenewOutcome};
use lockkeeper_testkit::laws::{give_back, granted, join_queue, request, soon, take};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};
use tokio::runtime::{Builder, Runtime};

fn caller(server: &Server) -> String {
    format!("{}?runtime=caller", url(server.addr()))
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn connections(server: &Server) -> i64 {
    number(server, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockkeeper'")
}

/// How many threads of stores this process has.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("lockkeeper-post")).count()
}

/// All in one test: no other test of this process may have a store meanwhile.
#[test]
fn the_callers_runtime_will_do() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let home = runtime();
    home.block_on(everything_works_there(&server));
    other_runtimes_may_use_it_too(&server, &home);
    home.block_on(async { drop(open(&caller(&server)).await) });
    gone(&server);
    a_store_on_a_runtime_that_ends_reports_it(&server);
    gone(&server);
    a_runtime_without_io_is_refused(&server);
}

async fn everything_works_there(server: &Server) {
    let (here, there) = (open(&caller(server)).await, open(&caller(server)).await);
    assert_eq!(threads(), 0);
    assert!(here.profile().watch, "{:?}", here.profile().findings);
    let held = take(&here, &request("x")).await;
    let waiter = join_queue(&there, &request("x"), 1).await;
    assert_eq!(here.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&here, &held.key).await;
    let next = granted(waiter).await;
    assert!(next.fence > held.fence);
    // With clients that have a thread of their own they are in one queue.
    let third = client_of(server).await;
    let waiter = join_queue(&third, &request("x"), 1).await;
    give_back(&there, &next.key).await;
    assert!(granted(waiter).await.fence > next.fence);
}

/// A runtime without I/O, as that on which guards are renewed.
fn other_runtimes_may_use_it_too(server: &Server, home: &Runtime) {
    let store = home.block_on(open(&caller(server)));
    let bare = Builder::new_current_thread().build().unwrap();
    bare.block_on(async {
        let Ok(AcquireOutcome::Granted(held)) = store.acquire(&request("y")).await else {
            panic!("it was free")
        };
        assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    });
}

fn gone(server: &Server) {
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while connections(server) > 0 {
        assert!(std::time::Instant::now() < until, "connections are left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The runtime is shut down, and a task on another one still has the store.
fn a_store_on_a_runtime_that_ends_reports_it(server: &Server) {
    let home = runtime();
    let (store, held) = home.block_on(async {
        let store = open(&caller(server)).await;
        let held = take(&store, &request("z")).await;
        (store, held)
    });
    let elsewhere = runtime();
    let waits = elsewhere.block_on(join_queue(&store, &request("z"), 1));
    home.shutdown_timeout(Duration::from_secs(10));
    elsewhere.block_on(async {
        let told = soon("a release is told", store.release(&held.key)).await;
        assert!(matches!(told, Err(Error::Unavailable(_) | Error::Unknown(_))), "{told:?}");
        let told = soon("a request is answered", store.acquire(&request("w"))).await;
        assert!(matches!(told, Err(Error::Unavailable(_))), "{told:?}");
    });
    waits.abort();
}

fn a_runtime_without_io_is_refused(server: &Server) {
    let bare = Builder::new_current_thread().enable_time().build().unwrap();
    let error = bare.block_on(refused_at_open(&caller(server)));
    says(&error, Outcome::Invalid, &["enable_all"]);
}
