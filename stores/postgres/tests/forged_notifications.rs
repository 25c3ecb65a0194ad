//! Messages from roles that may only read: PostgreSQL lets every role NOTIFY, so a message proves nothing.

mod common;

use std::time::Duration;

use common::{Client, ask_for, open, sql, sql_as, try_sql_as, url};
use lockkeeper_core::{AcquireOutcome, Grant, RenewOutcome, Wait};
use lockkeeper_testkit::laws::{eventually, give_back, name, soon, take, with};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};
use tokio::task::JoinHandle;

const TTL: Duration = Duration::from_secs(600);

async fn enqueue(store: &Client) -> JoinHandle<Grant> {
    let (store, request) =
        (store.clone(), with(ask_for("orders/42", TTL), |request| request.wait = Wait::Forever));
    let waiter = tokio::spawn({
        let store = store.clone();
        async move {
            let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request).await else {
                panic!("not granted")
            };
            grant
        }
    });
    eventually("the waiter is in the queue", || async {
        store.inspect(&name("orders/42")).await.unwrap().is_some_and(|view| view.waiting == 1)
    })
    .await;
    waiter
}

fn is_listening(server: &Server) -> bool {
    sql(server, "SELECT count(*) FROM lockkeeper.client WHERE listens") != "0"
}

/// The role `reader`, which may read everything.
fn create_reader(server: &Server) {
    sql(
        server,
        "CREATE ROLE reader LOGIN; GRANT USAGE ON SCHEMA lockkeeper TO reader; \
         GRANT SELECT ON ALL TABLES IN SCHEMA lockkeeper TO reader; GRANT pg_read_all_data TO reader",
    );
}

/// The functions take the hash of the attempt, which is in the tables. They run with the rights of the role that calls them, so a role that
/// may only read can neither renew nor release the hold, nor acquire or break the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_only_read_cannot_act_as_a_holder() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=200s&claim=600s", url(server.addr()));
    let (here, there) = (open(&url).await, open(&url).await);
    let held = take(&here, &ask_for("orders/42", TTL)).await;
    let waiter = enqueue(&there).await;
    create_reader(&server);
    let rows = || {
        let rows = |table| sql(&server, &format!("SELECT t FROM lockkeeper.{table} t ORDER BY t"));
        ["lock", "waiter", "hold"].map(rows)
    };
    let (before, no) = (rows(), "60000000, NULL, '{}'");
    let request =
        |kind: u8, attempt: &str| format!("run_request('x', 1, 60000000, {kind}, name, {attempt}, {no})");
    for call in [
        "renew(name, attempt)",
        "release(ARRAY[name], attempt)",
        &request(0, "attempt"),
        &request(1, "attempt"),
        &request(2, "attempt"),
        // The attempt of the reader itself.
        &request(0, "'\\x01'"),
        &request(1, "'\\x01'"),
        &request(3, "'\\x01'"),
        &format!("acquire('x', 1, 60000000, false, ARRAY[name], attempt, {no})"),
        "drop_hold(name, attempt)",
        "revoke(name, 'a test')",
        "break_lock(name, 'a test')",
        "poll('x', 1, 60000000, true, ARRAY[name])",
        "next_fence(lockkeeper.now_us())",
    ] {
        for table in ["lock", "waiter"] {
            let call = format!("SELECT lockkeeper.{call} FROM lockkeeper.{table}");
            let refused = try_sql_as(&server, "reader", &call).expect_err(&call);
            assert!(refused.contains("permission denied"), "{call}: {refused}");
        }
    }
    assert_eq!(rows(), before);
    assert!(!waiter.is_finished(), "the waiter was granted a lock that another client holds");
    assert_eq!(here.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&here, &held.key).await;
    give_back(&there, &soon("the waiter is granted the lock", waiter).await.unwrap().key).await;
}

/// A role that could read all tables sent a waiter three numbers in a NOTIFY, and the waiter ran beside the holder, with a fence of the
/// attacker's choice: one so high that every later holder was refused by the resource.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_only_read_cannot_make_a_waiter_a_holder() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=200ms", url(server.addr()));
    let (here, there) = (open(&url).await, open(&url).await);
    let held = take(&here, &ask_for("orders/42", TTL)).await;
    let waiter = enqueue(&there).await;
    eventually("messages reach the waiter's process", || async { is_listening(&server) }).await;
    create_reader(&server);
    for _ in 0..20 {
        let sent = sql_as(
            &server,
            "reader",
            "SELECT count(pg_notify('lockkeeper_' || client, concat_ws(' ', encode(attempt, 'hex'), 9007199254740000, \
             (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, 60000000))) FROM lockkeeper.waiter",
        );
        assert_eq!(sent, "1", "the forged message was sent to the one waiter");
    }
    // The waiter has handled all of them when it has been looked after a few times more.
    let polled = || sql(&server, "SELECT alive_until FROM lockkeeper.client WHERE listens");
    for _ in 0..3 {
        let before = polled();
        eventually("the waiter's process polls", || async { polled() != before }).await;
    }
    assert!(!waiter.is_finished(), "the waiter believes to hold a lock that another client holds");
    give_back(&here, &held.key).await;
    let grant = soon("the waiter is granted the lock", waiter).await.unwrap();
    assert!(grant.fence > held.fence);
    assert!(grant.fence.get() < 9_007_199_254_740_000, "the fence came from the forged message");
    give_back(&there, &grant.key).await;
}

/// The release hands the lock to the waiter, and the message is lost because the connection that would bring it is half open: the
/// poll finds the grant. The waiter used to wait beside a free lock: its queue entry was gone with the hand-off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_message_is_lost_finds_its_grant_by_polling() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=200ms&claim=20s", url(server.addr()));
    let (here, there) = (open(&url).await, open(&url).await);
    let held = take(&here, &ask_for("orders/42", TTL)).await;
    let waiter = enqueue(&there).await;
    eventually("messages reach the waiter's process", || async { is_listening(&server) }).await;
    // The server process that brings the messages stays, and its socket too: it only says nothing any more.
    let listener = common::number(
        &server,
        "SELECT pid FROM pg_stat_activity WHERE query LIKE '%LISTEN lockkeeper%' AND state = 'idle'",
    );
    let listener = rustix::process::Pid::from_raw(listener as i32).unwrap();
    rustix::process::kill_process(listener, rustix::process::Signal::STOP).unwrap();
    give_back(&here, &held.key).await;
    let granted = soon("the waiter finds its grant", waiter).await;
    rustix::process::kill_process(listener, rustix::process::Signal::CONT).unwrap();
    let grant = granted.unwrap();
    assert!(grant.fence > held.fence);
    give_back(&there, &grant.key).await;
}
