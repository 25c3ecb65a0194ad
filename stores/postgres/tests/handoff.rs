//! A release hands the lock to the first waiter: how long its lease lasts, and what happens when the notification is lost.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Client, ask_for, client_of, number, open, sql, url};
use futures_util::future::join;
use lockkeeper_core::{AcquireOutcome, Grant, ReleaseOutcome, Wait};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{eventually, give_back, is_free, name, request, soon, take, with};
use lockkeeper_testkit::proxy::{Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server, Signal};
use rustix::process::{Pid, kill_process};
use tokio::task::JoinHandle;

const TTL: Duration = Duration::from_secs(600);

type WaitingBackends = JoinHandle<Grant>;

/// A waiter that is in the queue when this returns.
async fn enqueue(store: &Client, count: usize) -> WaitingBackends {
    let (waiting, patient) =
        (store.clone(), with(ask_for("orders/42", TTL), |request| request.wait = Wait::Forever));
    let waiter = tokio::spawn(async move {
        let Ok(AcquireOutcome::Granted(grant)) = waiting.acquire(&patient).await else {
            panic!("not served")
        };
        grant
    });
    eventually("the waiter is in the queue", || async {
        store.inspect(&name("orders/42")).await.unwrap().is_some_and(|view| view.waiting == count)
    })
    .await;
    waiter
}

/// The server process of the listening connection.
fn listener(server: &Server) -> Pid {
    let pid = number(
        server,
        "SELECT pid FROM pg_stat_activity WHERE query LIKE '%LISTEN lockkeeper%' AND state = 'idle'",
    );
    Pid::from_raw(pid as i32).unwrap()
}

fn signal(pid: Pid, signal: Signal) {
    kill_process(pid, signal).unwrap();
}

fn is_listening(server: &Server) -> bool {
    number(server, "SELECT count(*) FROM lockkeeper.client WHERE listens") > 0
}

/// A waiter that was handed the lock reads from the database how much of its lease is left, counted from the moment it sent that
/// request: the waiter stops before the lease ends, also when it was woken late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handed_over_lease_ends_at_the_waiter_before_it_ends_in_the_database() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=2s&claim=20s", url(server.addr()));
    let (here, there) = (open(&url).await, open(&url).await);
    let mut given = 0;
    for turn in 0..40 {
        let held = take(&here, &request("orders/42")).await;
        let waiter = enqueue(&there, 1).await;
        eventually("notifications reach the waiter's process", || async { is_listening(&server) }).await;
        let late = turn % 10 == 9;
        if late {
            // A while after the last poll; and the waiter is woken a while after the hand-off.
            tokio::time::sleep(Duration::from_millis(1500)).await;
            signal(listener(&server), Signal::STOP);
        }
        give_back(&here, &held.key).await;
        let released_at = SystemClock.now();
        if late {
            tokio::time::sleep(Duration::from_millis(100)).await;
            signal(listener(&server), Signal::CONT);
        }
        let grant = soon("the waiter is granted the lock", waiter).await.unwrap();
        assert!(grant.fence > held.fence);
        if grant.lease < TTL {
            given += 1;
            // The lease began before the release returned, and lasts no longer than the waiter's process is known to live.
            let ends = released_at + Duration::from_secs(20);
            assert!(
                grant.sent_at + grant.lease <= ends,
                "the waiter believes to hold the lock for longer than it does"
            );
        }
        assert_eq!(there.release(&grant.key).await.unwrap(), ReleaseOutcome::Released);
    }
    assert!(given >= 10, "only {given} were handed the lock by a release");
}

/// The server process of the listening connection is stopped during the hand-off, and ends without having sent the notification. The
/// waiter sends its request again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_notification_is_lost_requests_again() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    // No poll is due within this test.
    let url = format!("{}?poll=200s&claim=600s", url(server.addr()));
    let (here, there) = (open(&url).await, open(&url).await);
    let held = take(&here, &request("orders/42")).await;
    let (first, second) = (enqueue(&there, 1).await, enqueue(&there, 2).await);
    eventually("notifications reach the waiter's process", || async { is_listening(&server) }).await;
    let ear = listener(&server);
    signal(ear, Signal::STOP);
    give_back(&here, &held.key).await;
    assert_eq!(
        number(&server, "SELECT count(*) FROM lockkeeper.waiter"),
        1,
        "the lock was not handed to the first waiter"
    );
    assert!(!first.is_finished(), "no notification can have arrived");
    sql(&server, &format!("SELECT pg_terminate_backend({})", ear.as_raw_nonzero()));
    signal(ear, Signal::CONT);
    let grant = soon("the first waiter is granted the lock", first).await.unwrap();
    assert!(!second.is_finished(), "two hold the lock");
    give_back(&there, &grant.key).await;
    let next = soon("the second waiter is granted the lock", second).await.unwrap();
    assert!(next.fence > grant.fence);
    give_back(&there, &next.key).await;
    is_free(&there, "orders/42").await;
}

/// The listening connection ends right behind the reply to LISTEN. The client may find both at once: then it believed to
/// listen, without a connection, and never listened again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_as_it_begins_to_listen_is_made_again() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    // No poll is due within this test.
    let url = |addr| format!("{}?poll=200s&claim=600s", url(addr));
    let (here, there) = (open(&url(server.addr())).await, open(&url(proxy.addr())).await);
    let held = take(&here, &request("orders/42")).await;
    let waiter = enqueue(&there, 1).await;
    let ear = || Pick::sent("LISTEN lockkeeper");
    for _ in 0..20 {
        let ends = proxy.inject(Fault::at_reply(1).on(ear()).cut_after());
        soon("there is one to cut", async {
            while !ends.fired() {
                proxy.cut(ear());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
    give_back(&here, &held.key).await;
    let grant = soon("the waiter is granted the lock", waiter).await.unwrap();
    give_back(&there, &grant.key).await;
}

/// A caller abandons a statement on the listening connection, so the client closes that connection, and cancels the statement before. The
/// network is down for the cancellation, which takes as long as `timeout` then: waiters were notified only after that, and nothing woke them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_notified_before_the_statement_of_their_connection_is_cancelled() {
    const CANCEL_REQUEST: [u8; 4] = 80_877_102u32.to_be_bytes();
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    // No poll is due within this test, and the cancellation does not time out.
    let url = |addr| format!("{}?timeout=200s&poll=200s&claim=600s", url(addr));
    let (here, there) = (open(&url(server.addr())).await, open(&url(proxy.addr())).await);
    let held = take(&here, &request("orders/42")).await;
    let waiter = enqueue(&there, 1).await;
    eventually("notifications reach the waiter's process", || async { is_listening(&server) }).await;
    let cancels = Pick::Sent(Arc::new(|sent| sent.get(4..8) == Some(&CANCEL_REQUEST[..])));
    let cancel = proxy.inject(Fault::at_request(1).on(cancels).hold());
    let listens = proxy.inject(Fault::at_request(1).on(Pick::sent("LISTEN lockkeeper_events")).hold());
    let watching = there.clone();
    let watching = tokio::spawn(async move { watching.watch("").await.map(drop) });
    soon("the client sends LISTEN for its watcher", listens.until_fired()).await;
    watching.abort();
    soon("the client cancels the statement", cancel.until_fired()).await;
    give_back(&here, &held.key).await;
    let grant = soon("the waiter is granted the lock", waiter).await.unwrap();
    give_back(&there, &grant.key).await;
}

/// A process that died in the queue is handed the lock for no longer than its claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_does_not_keep_a_lock_that_was_handed_to_it() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=200ms&claim=3s", url(server.addr()));
    let (here, gone) = (open(&url).await, open(&url).await);
    let held = take(&here, &request("orders/42")).await;
    let dead = enqueue(&gone, 1).await;
    eventually("notifications reach the waiter's process", || async { is_listening(&server) }).await;
    let patient = enqueue(&here, 2).await;
    // Its thread ends, with all its connections; nothing is released.
    dead.abort();
    drop(gone);
    give_back(&here, &held.key).await;
    let grant = soon("the next waiter is granted the lock", patient).await.unwrap();
    give_back(&here, &grant.key).await;
}

/// A request that finds the lock held is sent twice: the fast path first, then the full function. A release in between ends
/// both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_released_at_once_is_in_no_queue() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (here, there) = (client_of(&server).await, client_of(&server).await);
    let held = take(&here, &request("x")).await;
    for turn in 0..200 {
        let patient = with(request("x"), |request| request.wait = Wait::Forever);
        let back = async {
            // From before the first statement until after the second.
            let (began, span) = (Instant::now(), Duration::from_micros(turn * 10));
            while began.elapsed() < span {
                tokio::task::yield_now().await;
            }
            there.release(&patient.key).await
        };
        let (asked, back) = soon("both are answered", join(there.acquire(&patient), back)).await;
        assert!(asked.is_err(), "{asked:?}");
        back.unwrap();
        let waiting = here.inspect(&name("x")).await.unwrap().unwrap().waiting;
        assert_eq!(waiting, 0, "turn {turn}");
    }
    give_back(&here, &held.key).await;
}
