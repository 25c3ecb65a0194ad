//! A store whose connections are on the runtime that opened it.

mod common;

use std::time::Duration;

use common::{client_of, number, open, refused_at_open, says, url};
use lockkeeper_core::{Acquired, Error, Outcome, Release, Renewal};
use lockkeeper_testkit::laws::{ask, give_back, granted, soon, stand_in_line, take};
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

/// All in one: nobody else of this process is to have a store meanwhile.
#[test]
fn the_callers_runtime_will_do() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let home = runtime();
    home.block_on(everything_works_there(&server));
    others_may_ask_too(&server, &home);
    home.block_on(async { drop(open(&caller(&server)).await) });
    gone(&server);
    one_that_ends_is_told(&server);
    gone(&server);
    one_that_cannot_is_refused(&server);
}

async fn everything_works_there(server: &Server) {
    let (here, there) = (open(&caller(server)).await, open(&caller(server)).await);
    assert_eq!(threads(), 0);
    assert!(here.profile().watch, "{:?}", here.profile().notes);
    let held = take(&here, &ask("x")).await;
    let waiter = stand_in_line(&there, &ask("x"), 1).await;
    assert_eq!(here.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Renewed]);
    give_back(&here, &held.claim).await;
    let next = granted(waiter).await;
    assert!(next.fence > held.fence);
    // With those who have a thread they are in one line.
    let third = client_of(server).await;
    let waiter = stand_in_line(&third, &ask("x"), 1).await;
    give_back(&there, &next.claim).await;
    assert!(granted(waiter).await.fence > next.fence);
}

/// A runtime without I/O, as that on which guards are renewed.
fn others_may_ask_too(server: &Server, home: &Runtime) {
    let store = home.block_on(open(&caller(server)));
    let bare = Builder::new_current_thread().build().unwrap();
    bare.block_on(async {
        let Ok(Acquired::Granted(held)) = store.acquire(&ask("y")).await else { panic!("it was free") };
        assert_eq!(store.release(&held.claim).await.unwrap(), Release::Released);
    });
}

fn gone(server: &Server) {
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while connections(server) > 0 {
        assert!(std::time::Instant::now() < until, "connections are left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The runtime is shut down, and somebody on another one still has the store.
fn one_that_ends_is_told(server: &Server) {
    let home = runtime();
    let (store, held) = home.block_on(async {
        let store = open(&caller(server)).await;
        let held = take(&store, &ask("z")).await;
        (store, held)
    });
    let elsewhere = runtime();
    let waits = elsewhere.block_on(stand_in_line(&store, &ask("z"), 1));
    home.shutdown_timeout(Duration::from_secs(10));
    elsewhere.block_on(async {
        let told = soon("a release is told", store.release(&held.claim)).await;
        assert!(matches!(told, Err(Error::Unavailable(_) | Error::Unknown(_))), "{told:?}");
        let told = soon("an ask is told", store.acquire(&ask("w"))).await;
        assert!(matches!(told, Err(Error::Unavailable(_))), "{told:?}");
    });
    waits.abort();
}

fn one_that_cannot_is_refused(server: &Server) {
    let bare = Builder::new_current_thread().enable_time().build().unwrap();
    let error = bare.block_on(refused_at_open(&caller(server)));
    says(&error, Outcome::Invalid, &["enable_all"]);
}
