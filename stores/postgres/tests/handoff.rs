//! Whoever gives a lock back gives it to the first in line: what that one believes, and what happens when it is not told.

mod common;

use std::time::{Duration, Instant};

use common::{Client, ask_for, client_of, number, open, sql, url};
use futures_util::future::join;
use lockkeeper_core::{Acquired, Grant, Release, Wait};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{ask, eventually, give_back, is_free, name, soon, take, with};
use lockkeeper_testkit::proxy::{Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server, Signal};
use rustix::process::{Pid, kill_process};
use tokio::task::JoinHandle;

const TTL: Duration = Duration::from_secs(600);

type Waiting = JoinHandle<Grant>;

/// One that waits, and is in line when this returns.
async fn stands(store: &Client, count: usize) -> Waiting {
    let (waiting, patient) = (store.clone(), with(ask_for("orders/42", TTL), |ask| ask.wait = Wait::Forever));
    let waiter = tokio::spawn(async move {
        let Ok(Acquired::Granted(grant)) = waiting.acquire(&patient).await else { panic!("not served") };
        grant
    });
    eventually("it stands in line", || async {
        store.inspect(&name("orders/42")).await.unwrap().is_some_and(|view| view.waiting == count)
    })
    .await;
    waiter
}

/// The server process that brings messages.
fn ear(server: &Server) -> Pid {
    let pid = number(
        server,
        "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN lockkeeper%' AND state = 'idle'",
    );
    Pid::from_raw(pid as i32).unwrap()
}

fn signal(pid: Pid, signal: Signal) {
    kill_process(pid, signal).unwrap();
}

fn hears(server: &Server) -> bool {
    number(server, "SELECT count(*) FROM lockkeeper.client WHERE hears") > 0
}

/// A waiter that was handed the lock reads from the database how much of its lease is left, counted from the moment it sent that
/// question: the waiter stops believing before the lease ends, also when it was woken late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_believes_in_a_hand_off_for_no_longer_than_its_lease() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=2s&claim=20s", url(server.addr()));
    let (here, there) = (open(&url).await, open(&url).await);
    let mut given = 0;
    for turn in 0..40 {
        let held = take(&here, &ask("orders/42")).await;
        let waiter = stands(&there, 1).await;
        eventually("messages reach it", || async { hears(&server) }).await;
        let late = turn % 10 == 9;
        if late {
            // A while after the last look; and it is told a while after it was given.
            tokio::time::sleep(Duration::from_millis(1500)).await;
            signal(ear(&server), Signal::STOP);
        }
        give_back(&here, &held.claim).await;
        let released_at = SystemClock.now();
        if late {
            tokio::time::sleep(Duration::from_millis(100)).await;
            signal(ear(&server), Signal::CONT);
        }
        let grant = soon("it is served", waiter).await.unwrap();
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
        assert_eq!(there.release(&grant.claim).await.unwrap(), Release::Released);
    }
    assert!(given >= 10, "only {given} were given the lock by whoever had it");
}

/// The server process that brings the messages is stopped while the lock is given away, and ends without having told. Whoever
/// was given it asks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_was_lost_is_asked_for() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    // Nobody looks by the clock within this test.
    let url = format!("{}?poll=200s&claim=600s", url(server.addr()));
    let (here, there) = (open(&url).await, open(&url).await);
    let held = take(&here, &ask("orders/42")).await;
    let (first, second) = (stands(&there, 1).await, stands(&there, 2).await);
    eventually("messages reach it", || async { hears(&server) }).await;
    let ear = ear(&server);
    signal(ear, Signal::STOP);
    give_back(&here, &held.claim).await;
    assert_eq!(
        number(&server, "SELECT count(*) FROM lockkeeper.waiter"),
        1,
        "it was not given to the first in line"
    );
    assert!(!first.is_finished(), "nobody can have told it");
    sql(&server, &format!("SELECT pg_terminate_backend({})", ear.as_raw_nonzero()));
    signal(ear, Signal::CONT);
    let grant = soon("the first is served", first).await.unwrap();
    assert!(!second.is_finished(), "two have it");
    give_back(&there, &grant.claim).await;
    let next = soon("and so is the second", second).await.unwrap();
    assert!(next.fence > grant.fence);
    give_back(&there, &next.claim).await;
    is_free(&there, "orders/42").await;
}

/// The connection that brings messages ends right behind the answer to LISTEN. Both may be found at once: then it was thought to
/// listen, without a connection, and never listened again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_as_it_begins_to_listen_is_made_again() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    // Nobody looks by the clock within this test.
    let url = |addr| format!("{}?poll=200s&claim=600s", url(addr));
    let (here, there) = (open(&url(server.addr())).await, open(&url(proxy.addr())).await);
    let held = take(&here, &ask("orders/42")).await;
    let waiter = stands(&there, 1).await;
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
    give_back(&here, &held.claim).await;
    let grant = soon("it is served", waiter).await.unwrap();
    give_back(&there, &grant.claim).await;
}

/// A process that died in line is given the lock for no longer than it is thought to be there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_who_left_without_a_word_does_not_keep_what_it_was_given() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=200ms&claim=3s", url(server.addr()));
    let (here, gone) = (open(&url).await, open(&url).await);
    let held = take(&here, &ask("orders/42")).await;
    let dead = stands(&gone, 1).await;
    eventually("messages reach it", || async { hears(&server) }).await;
    let patient = stands(&here, 2).await;
    // Its thread ends, with all its connections; nothing is given back.
    dead.abort();
    drop(gone);
    give_back(&here, &held.claim).await;
    let grant = soon("the next is let in", patient).await.unwrap();
    give_back(&here, &grant.claim).await;
}

/// An ask that finds the lock taken is sent twice: what is usual first, then in full. Whoever takes it back in between has taken back
/// all of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_who_takes_the_ask_back_at_once_stands_in_no_line() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (here, there) = (client_of(&server).await, client_of(&server).await);
    let held = take(&here, &ask("x")).await;
    for turn in 0..200 {
        let patient = with(ask("x"), |ask| ask.wait = Wait::Forever);
        let back = async {
            // From before the first statement until after the second.
            let (began, span) = (Instant::now(), Duration::from_micros(turn * 10));
            while began.elapsed() < span {
                tokio::task::yield_now().await;
            }
            there.release(&patient.claim).await
        };
        let (asked, back) = soon("both are told", join(there.acquire(&patient), back)).await;
        assert!(asked.is_err(), "{asked:?}");
        back.unwrap();
        let waiting = here.inspect(&name("x")).await.unwrap().unwrap().waiting;
        assert_eq!(waiting, 0, "turn {turn}");
    }
    give_back(&here, &held.claim).await;
}
