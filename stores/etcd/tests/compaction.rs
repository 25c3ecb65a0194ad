//! Compaction: etcd deletes the history of keys.

mod common;

use common::{ctl, open, try_open};
use futures_util::StreamExt;
use lockkeeper_core::{EventKind, RenewOutcome};
use lockkeeper_testkit::laws::{eventually, give_back, name, request, soon, take};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// etcd compacts the events that a disconnected watcher has missed: the watch resumes with the current state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_survives_a_compaction() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Bytes);
    let away = try_open(&format!("etcd://{}?timeout=5s", proxy.addr())).await.unwrap();
    let here = open(server.addr()).await;
    let mut events = away.watch("watched/").await.unwrap();
    let first = take(&here, &request("watched/1")).await;
    let event = soon("an event comes", events.next()).await.unwrap().unwrap();
    assert_eq!(event.kind, EventKind::Granted { fence: first.fence });
    proxy.cut_all();
    give_back(&here, &first.key).await;
    let missed = take(&here, &request("watched/1")).await;
    give_back(&here, &missed.key).await;
    let outcome = ctl(server.addr(), &["get", "nothing", "-w", "json"]);
    let revision: String =
        outcome.split("\"revision\":").nth(1).unwrap().chars().take_while(char::is_ascii_digit).collect();
    ctl(server.addr(), &["compaction", &revision]);
    proxy.heal();
    // Changes are made until the watch reports one. From there on it reports all of them.
    let outcome = async {
        loop {
            let held = take(&here, &request("watched/2")).await;
            give_back(&here, &held.key).await;
            let next = tokio::time::timeout(std::time::Duration::from_millis(200), events.next()).await;
            let next = next.ok().flatten().and_then(|event| event.ok());
            if next.is_some_and(|event| event.name == name("watched/2")) {
                return;
            }
        }
    };
    soon("the watch reports a change", outcome).await;
    let last = take(&here, &request("watched/3")).await;
    let until = async {
        loop {
            let event = events.next().await.unwrap().unwrap();
            if event.name == name("watched/3") {
                return event.kind;
            }
        }
    };
    assert_eq!(soon("it goes on", until).await, EventKind::Granted { fence: last.fence });
}

/// Holders and waiters need no history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_and_waiters_survive_a_compaction() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let held = take(&store, &request("x")).await;
    let waiter = lockkeeper_testkit::laws::join_queue(&store, &request("x"), 1).await;
    for i in 0..20 {
        let other = take(&store, &request(&format!("other/{i}"))).await;
        give_back(&store, &other.key).await;
    }
    let outcome = ctl(server.addr(), &["get", "nothing", "-w", "json"]);
    let revision: String =
        outcome.split("\"revision\":").nth(1).unwrap().chars().take_while(char::is_ascii_digit).collect();
    ctl(server.addr(), &["compaction", "--physical", &revision]);
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    give_back(&store, &held.key).await;
    let next = lockkeeper_testkit::laws::granted(waiter).await;
    assert!(next.fence > held.fence);
    give_back(&store, &next.key).await;
    eventually("nothing is left", || async { store.inspect(&name("x")).await.unwrap().is_none() }).await;
}
