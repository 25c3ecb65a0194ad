//! The stored formats. `golden/v1.json` contains nodes that a program with format 1 wrote: this program must read them,
//! and must write the same. If the second test fails, either restore the format, or raise `codec::FORMAT`, keep this file
//! for what is still read, and add one for the new version.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open};
use lockkeeper_core::{
    Attempt, Expect, Holder, LockRequest, Names, ReleaseOutcome, RenewOutcome, RequestKey, Wait,
};
use lockkeeper_testkit::laws::{give_back, granted, join_queue, name, refused, request, take, with};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};
use zookeeper_client::{Acls, Client, CreateMode};

const GOLDEN: &str = include_str!("golden/v1.json");

/// One stored node: its path without the numbers that ZooKeeper chooses, and its content without times.
type StoredNode = (String, String);

fn fixed(text: &str, attempt: u8) -> LockRequest {
    let holder = Holder { host: "db-1".into(), pid: 7, label: Some("nightly".into()) };
    with(request(text), |request| {
        request.key =
            RequestKey { names: Names::from(name(text)), attempt: Attempt::from_bytes([attempt; 16]) };
        (request.holder, request.ttl) = (Arc::new(holder), Duration::from_secs(600));
    })
}

/// Replaces a sequence number at the end of a path, and the value of `since_us`.
fn normalize(path: &str, data: &[u8]) -> StoredNode {
    let stem = path.trim_end_matches(|c: char| c.is_ascii_digit());
    let path = if path.len() - stem.len() >= 10 { format!("{stem}SEQUENCE") } else { path.to_owned() };
    let data = String::from_utf8_lossy(data).into_owned();
    let Some((before, after)) = data.split_once("\"since_us\":") else { return (path, data) };
    let after = after.trim_start_matches(|c: char| c.is_ascii_digit());
    (path, format!("{before}\"since_us\":1700000000000000{after}"))
}

async fn stored(admin: &Client) -> Vec<StoredNode> {
    let mut nodes = Vec::new();
    for path in common::tree(admin, "/lock").await {
        let parts: Vec<&str> = path.split('/').collect();
        // Barriers are named for their session, the base for the clock.
        if matches!(parts.get(2), Some(&"=barriers" | &"=fence-base")) && parts.len() > 3 {
            continue;
        }
        let (data, _) = admin.get_data(&path).await.unwrap();
        nodes.push(normalize(&path, &data));
    }
    nodes.sort();
    nodes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_program_writes_format_1() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let held = take(&store, &fixed("orders/42", 1)).await;
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    let waiter = join_queue(&store, &fixed("orders/42", 2), 1).await;
    store.write(&name("config/a"), b"value", Expect::Absent, None).await.unwrap();
    let written = serde_json::to_string_pretty(&stored(&admin).await).unwrap();
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
        std::fs::write(format!("{dir}/v1.json"), written.clone() + "\n").unwrap();
    } else {
        assert_eq!(written, GOLDEN.trim_end(), "the stored format has changed: see the head of this file");
    }
    assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
    give_back(&store, &granted(waiter).await.key).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_program_reads_format_1() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (other, reader) = (admin(server.addr()).await, admin(server.addr()).await);
    let nodes: Vec<StoredNode> = serde_json::from_str(GOLDEN).unwrap();
    let (holder, waiter): (Vec<_>, Vec<_>) =
        nodes.into_iter().partition(|(path, data)| !path.contains("-lock-") || data.contains("no_wait"));
    // The waiter's node comes last, as its sequence number says.
    let mut entries: Vec<String> = Vec::new();
    for (path, data) in holder.iter().chain(&waiter) {
        let mode = match path.strip_suffix("SEQUENCE") {
            Some(_) => CreateMode::EphemeralSequential,
            None => CreateMode::Persistent,
        };
        let stem = path.strip_suffix("SEQUENCE").unwrap_or(path);
        let (_, sequence) =
            other.create(stem, data.as_bytes(), &mode.with_acls(Acls::anyone_all())).await.unwrap();
        if stem != path {
            entries.push(format!("{stem}{sequence}"));
        }
    }
    let store = open(server.addr()).await;
    let view = store.inspect(&name("orders/42")).await.unwrap().expect("the lock is held");
    assert_eq!((view.held.len(), view.waiting), (1, 1), "{view:?}");
    assert_eq!(view.held[0].holder.label.as_deref(), Some("nightly"));
    assert_eq!(view.held[0].expires_in_ms, 600_000);
    assert_eq!(store.read(&name("config/a")).await.unwrap().unwrap().value, b"value");
    refused(&store, &request("orders/42")).await;
    // The hold-back node keeps the lock when the session of the old program ends.
    for entry in entries {
        reader.delete(&entry, None).await.unwrap();
    }
    let view = store.inspect(&name("orders/42")).await.unwrap().expect("the lock is held back");
    assert!(view.held.is_empty() && view.delayed_ms.is_some(), "{view:?}");
    store.break_lock(&name("orders/42"), "the old program is gone").await.unwrap();
    let held = take(&store, &with(fixed("orders/42", 3), |request| request.wait = Wait::No)).await;
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_format_is_refused() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let admin = admin(server.addr()).await;
    let mode = CreateMode::Persistent.with_acls(Acls::anyone_all());
    admin.create("/lock", b"", &mode).await.unwrap();
    admin.create("/lock/=format", b"2", &mode).await.unwrap();
    let error = common::try_open(&format!("zk://{}", server.addr())).await.err().expect("another format");
    assert!(
        matches!(&error, lockkeeper_core::Error::Unsupported(why) if why.contains("format 2")),
        "{error}"
    );
}
