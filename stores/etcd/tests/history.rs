//! What etcd forgets on purpose: the past.

mod common;

use common::{ctl, open, try_open};
use futures_util::StreamExt;
use lockkeeper_core::{EventKind, Renewal};
use lockkeeper_testkit::laws::{ask, eventually, give_back, name, soon, take};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// While a watcher is away, things happen, and the history of them is thrown away: it goes on with what is now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_survives_a_compaction() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Bytes);
    let away = try_open(&format!("etcd://{}?timeout=5s", proxy.addr())).await.unwrap();
    let here = open(server.addr()).await;
    let mut events = away.watch("watched/").await.unwrap();
    let first = take(&here, &ask("watched/1")).await;
    let event = soon("an event comes", events.next()).await.unwrap().unwrap();
    assert_eq!(event.kind, EventKind::Granted { fence: first.fence });
    proxy.cut_all();
    give_back(&here, &first.claim).await;
    let missed = take(&here, &ask("watched/1")).await;
    give_back(&here, &missed.claim).await;
    let told = ctl(server.addr(), &["get", "nothing", "-w", "json"]);
    let revision: String =
        told.split("\"revision\":").nth(1).unwrap().chars().take_while(char::is_ascii_digit).collect();
    ctl(server.addr(), &["compaction", &revision]);
    proxy.heal();
    // Something happens until it is told of; what it is told from there on is all of it.
    let told = async {
        loop {
            let held = take(&here, &ask("watched/2")).await;
            give_back(&here, &held.claim).await;
            let next = tokio::time::timeout(std::time::Duration::from_millis(200), events.next()).await;
            let next = next.ok().flatten().and_then(|event| event.ok());
            if next.is_some_and(|event| event.name == name("watched/2")) {
                return;
            }
        }
    };
    soon("it is told of something", told).await;
    let last = take(&here, &ask("watched/3")).await;
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

/// Locks that are held, and those who wait, need no history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_and_waiters_survive_a_compaction() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let held = take(&store, &ask("x")).await;
    let waiter = lockkeeper_testkit::laws::stand_in_line(&store, &ask("x"), 1).await;
    for i in 0..20 {
        let other = take(&store, &ask(&format!("other/{i}"))).await;
        give_back(&store, &other.claim).await;
    }
    let told = ctl(server.addr(), &["get", "nothing", "-w", "json"]);
    let revision: String =
        told.split("\"revision\":").nth(1).unwrap().chars().take_while(char::is_ascii_digit).collect();
    ctl(server.addr(), &["compaction", "--physical", &revision]);
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Renewed]);
    give_back(&store, &held.claim).await;
    let next = lockkeeper_testkit::laws::granted(waiter).await;
    assert!(next.fence > held.fence);
    give_back(&store, &next.claim).await;
    eventually("nothing is left", || async { store.inspect(&name("x")).await.unwrap().is_none() }).await;
}
