//! The events that watchers receive: with roles that may only connect, and over connections that are half open.

mod common;

use std::future::poll_fn;
use std::time::Duration;

use common::{Client, ask_for, client_of, number, open, sql_as, try_sql, url};
use futures_util::StreamExt;
use lockkeeper_core::{Event, EventKind, EventStream};
use lockkeeper_postgres::tokio_postgres::{self, AsyncMessage, NoTls};
use lockkeeper_testkit::laws::{give_back, soon, take};
use lockkeeper_testkit::proxy::{Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};
use tokio::sync::mpsc;

/// A session of another role, and the notifications that it receives.
async fn session(server: &Server, role: &str) -> (tokio_postgres::Client, mpsc::UnboundedReceiver<String>) {
    let stream = tokio::net::TcpStream::connect(server.addr()).await.unwrap();
    let config: tokio_postgres::Config = format!("user={role} dbname=postgres").parse().unwrap();
    let (client, mut connection) = config.connect_raw(stream, NoTls).await.unwrap();
    let (heard, hears) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(note) = message {
                _ = heard.send(note.payload().to_owned());
            }
        }
    });
    (client, hears)
}

async fn next(events: &mut EventStream) -> Event {
    soon("an event comes", events.next()).await.unwrap().unwrap()
}

async fn cycle(store: &Client, name: &str) {
    let held = take(store, &ask_for(name, Duration::from_secs(60))).await;
    give_back(store, &held.key).await;
}

/// PostgreSQL lets every role LISTEN and NOTIFY on every channel that it can name, and the channel of events was called after the schema:
/// a role without any privileges received names, hosts and labels, and could send forged events to watchers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_only_connect_neither_receives_nor_forges_events() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = client_of(&server).await;
    let mut events = store.watch("").await.unwrap();
    common::sql(&server, "CREATE ROLE stranger LOGIN");
    let (stranger, mut hears) = session(&server, "stranger").await;
    stranger.batch_execute("LISTEN lockkeeper_events_lockkeeper; LISTEN lockkeeper_events_").await.unwrap();
    let forged = "SELECT pg_notify('lockkeeper_events_lockkeeper', '{\"at\": 1, \"name\": \"forged\", \"kind\": \"waiting\"}')";
    sql_as(&server, "stranger", forged);
    cycle(&store, "orders/42").await;
    let event = next(&mut events).await;
    assert_eq!((event.name.as_str(), matches!(event.kind, EventKind::Granted { .. })), ("orders/42", true));
    // A notification for it would arrive before the reply to this.
    stranger.batch_execute("SELECT 1").await.unwrap();
    assert!(hears.try_recv().is_ok_and(|own| own.contains("forged")), "its own message comes back");
    assert_eq!(hears.try_recv().ok(), None, "another role received an event");
    let read = stranger.query("SELECT channel FROM lockkeeper.state", &[]).await.unwrap_err();
    assert_eq!(read.code().unwrap().code(), "42501");
}

/// The digits of the channel come from a table, and become a part of SQL that other roles run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_channel_that_is_sql_is_refused() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = client_of(&server).await;
    common::sql(&server, "UPDATE lockkeeper.state SET channel = 'a; DROP TABLE lockkeeper.record'");
    assert!(store.watch("").await.is_err());
    assert!(try_sql(&server, "SELECT FROM lockkeeper.record").is_ok());
}

/// The server process that brings the messages stays, and its socket too: it only sends nothing any more. The client sent no keep-alive,
/// so a watcher received nothing for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_on_a_half_open_connection_receives_events_again() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    common::migrate(&server).await;
    let store = open(&format!("{}?timeout=500ms", url(server.addr()))).await;
    let mut events = store.watch("").await.unwrap();
    cycle(&store, "before").await;
    assert_eq!(next(&mut events).await.name.as_str(), "before");
    assert!(matches!(next(&mut events).await.kind, EventKind::Released { .. }));
    let listens =
        "SELECT max(pid) FROM pg_stat_activity WHERE query LIKE '%LISTEN lockkeeper%' AND state = 'idle'";
    let listener = rustix::process::Pid::from_raw(number(&server, listens) as i32).unwrap();
    rustix::process::kill_process(listener, rustix::process::Signal::STOP).unwrap();
    let missed = async {
        loop {
            cycle(&store, "after").await;
            let event = tokio::time::timeout(Duration::from_millis(50), events.next()).await;
            if event.is_ok_and(|event| matches!(event.unwrap().unwrap().kind, EventKind::Missed)) {
                break;
            }
        }
    };
    let heard = tokio::time::timeout(Duration::from_secs(30), missed).await;
    rustix::process::kill_process(listener, rustix::process::Signal::CONT).unwrap();
    heard.expect("the watcher gets a missed event");
}

/// The functions emit events for 30 s after a client last requested it, by the database's clock, and on the channel that is in the table. If they
/// had stopped, or used another channel, the watcher got no missed event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_learns_that_no_events_were_emitted_for_a_while() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = client_of(&server).await;
    let mut events = store.watch("").await.unwrap();
    for change in ["watched_until = 0", "channel = 'other'"] {
        common::sql(&server, &format!("UPDATE lockkeeper.state SET {change}"));
        cycle(&store, "lost").await;
        // Another watcher of the same process; the process requests events every 10 s.
        let _other = store.watch("").await.unwrap();
        cycle(&store, "after").await;
        assert!(matches!(next(&mut events).await.kind, EventKind::Missed), "{change}");
        assert_eq!(next(&mut events).await.name.as_str(), "after");
        assert!(matches!(next(&mut events).await.kind, EventKind::Released { .. }));
    }
}

/// The connection that brings events ends right behind the reply to LISTEN. The client may find both at once: then it believed to listen,
/// without a connection, and never listened again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_listens_again_when_the_connection_ends_as_it_begins() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    let store = open(&format!("{}?poll=100ms", url(proxy.addr()))).await;
    let mut events = store.watch("").await.unwrap();
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
    soon("events arrive again", async {
        loop {
            cycle(&store, "after").await;
            if tokio::time::timeout(Duration::from_millis(50), events.next()).await.is_ok() {
                break;
            }
        }
    })
    .await;
}
