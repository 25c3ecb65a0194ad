//! What dead processes leave behind, and how it is removed.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open, tree, try_open};
use lockkeeper_core::{Expect, Store, WriteOutcome};
use lockkeeper_testkit::laws::{eventually, give_back, name, request, take, with};
use lockkeeper_testkit::proxy::{Fault, Framing, Proxy};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};
use zookeeper_client::Client;

/// Two chunks.
const LARGE: usize = 1_000_000;

async fn count(admin: &Client, text: &str) -> usize {
    tree(admin, "/lock").await.iter().filter(|node| node.contains(text)).count()
}

async fn sweeps(addr: std::net::SocketAddr) -> Arc<dyn Store> {
    try_open(&format!("zk://{addr}?sweep=1s")).await.unwrap()
}

/// A process that ended right after it had overwritten a record left the chunks of the previous value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_overwritten_record_leaves_no_chunks() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (admin, key) = (admin(server.addr()).await, name("a large one"));
    for byte in 0..4 {
        let store = open(server.addr()).await;
        let written = store.write(&key, &vec![byte; LARGE], Expect::Any, None).await.unwrap();
        assert!(matches!(written, WriteOutcome::Written(_)));
        drop(store);
        assert_eq!(count(&admin, "/c-").await, 2);
    }
    let store = open(server.addr()).await;
    assert_eq!(store.read(&key).await.unwrap().unwrap().value, vec![3; LARGE]);
    store.delete(&key, Expect::Any).await.unwrap();
    assert_eq!(count(&admin, "/c-").await, 0);
}

/// The connection breaks at each request of a write in turn: chunks that no record names are removed, and no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_that_no_record_names_are_removed() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (admin, other) = (admin(server.addr()).await, sweeps(server.addr()).await);
    let kept = name("kept");
    other.write(&kept, &vec![7; LARGE], Expect::Any, None).await.unwrap();
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let store = try_open(&format!("zk://{}?timeout=3s", proxy.addr())).await.unwrap();
    let mut left = 0;
    for at in 1.. {
        let fault = proxy.inject(Fault::at_request(at).cut());
        _ = store.write(&name(&format!("{at}")), &vec![1; LARGE], Expect::Absent, None).await;
        if !fault.fired() {
            break;
        }
        left = left.max(count(&admin, "/c-").await);
        eventually("it is connected again", || async { store.read(&kept).await.is_ok() }).await;
    }
    assert!(left > 2, "the connection broke, and no chunk was left");
    eventually("chunks that no record names are removed", || async {
        let mut named = 0;
        for record in tree(&admin, "/lock/=records").await.iter().skip(1) {
            let (data, _) = admin.get_data(record).await.unwrap();
            named += String::from_utf8_lossy(&data).matches("\"c-").count();
        }
        count(&admin, "/c-").await == named
    })
    .await;
    assert_eq!(other.read(&kept).await.unwrap().unwrap().value, vec![7; LARGE]);
}

/// The hold-back node of a killed holder stayed for ever if no client used its lock again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_backs_of_dead_holders_are_removed() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let admin = admin(server.addr()).await;
    let dead = try_open(&format!("zk://{}?session=2s", server.addr())).await.unwrap();
    for text in ["a", "b", "c"] {
        let careful = |request: &mut lockkeeper_core::LockRequest| {
            // Long enough for three requests on a busy machine.
            (request.ttl, request.lock_delay) = (Duration::from_secs(8), Duration::from_millis(10));
        };
        take(&dead, &with(request(text), careful)).await;
    }
    assert_eq!(count(&admin, "=hold-back-").await, 3);
    drop(dead);
    let _other = sweeps(server.addr()).await;
    eventually("the hold-back nodes are removed", || async { count(&admin, "=hold-back-").await == 0 }).await;
}

/// Each process of the fleet ends before its first interval is over: no process ever swept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_live_for_moments_sweep_too() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let admin = admin(server.addr()).await;
    let open = async || try_open(&format!("zk://{}?sweep=4s", server.addr())).await.unwrap();
    let key = name("a large one");
    open().await.write(&key, &vec![1; LARGE], Expect::Absent, None).await.unwrap();
    // The record goes, as if its writer had died before it named the chunks.
    let record = tree(&admin, "/lock/=records").await.pop().expect("a record");
    admin.delete(&record, None).await.unwrap();
    assert_eq!(count(&admin, "/c-").await, 2);
    eventually("a process of a moment removes the chunks", || async {
        let store = open().await;
        for _ in 0..5 {
            give_back(&store, &take(&store, &request("a")).await.key).await;
        }
        count(&admin, "/c-").await == 0
    })
    .await;
}
