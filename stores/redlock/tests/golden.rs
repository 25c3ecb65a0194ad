//! The stored format v2. `golden/v2.txt` has the keys of one node that this version leaves behind a hold and a revoked hold: this version must
//! write the same, and every later version must read them.
//!
//! If the format changes, raise `VERSION` in `lua/common.lua`, keep this file for the version that is still read, and add one.
//! `LOCKKEEPER_BLESS=1` writes it.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Fleet, take};
use lockkeeper_core::{AcquireOutcome, Attempt, Holder, LockName, LockRequest, Locks, ReleaseOutcome};
use lockkeeper_testkit::servers::{RedisKey, redis_call};

const GOLDEN: &str = include_str!("golden/v2.txt");
const TTL: Duration = Duration::from_secs(600);

/// A request that is the same in every run.
fn fixed(lock: &str, attempt: u8) -> LockRequest {
    let holder = Holder { host: "db-1".into(), pid: 7, label: Some("nightly".into()) };
    let name = LockName::new(lock).unwrap();
    LockRequest::new(Attempt::from_bytes([attempt; 16]), name, TTL, Arc::new(holder))
}

/// Replaces the words of a value that are times: the fence, the start, the fence counter.
fn without_times(part: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(part);
    let word = |word: &str| match word.len() == 16 && word.bytes().all(|byte| byte.is_ascii_digit()) {
        true => "TIME".to_owned(),
        false => word.to_owned(),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ").into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_writes_format_2() {
    let Some(fleet) = Fleet::start() else { return };
    let store = fleet.open("young_node=0s&max_ttl=60m&node_timeout=10s&timeout=20s").await;
    take(&store, &fixed("held", 1)).await;
    take(&store, &fixed("revoked", 2)).await;
    store.revoke(&LockName::new("revoked").unwrap(), "maintenance").await.unwrap();
    // A round goes on at the nodes that were not needed for it: the chosen fence reaches each of them.
    let stored = |node: usize| {
        let mut keys = RedisKey::all(fleet.servers[node].addr());
        keys.iter_mut().flat_map(|key| &mut key.parts).for_each(|part| *part = without_times(part));
        RedisKey::print(&keys)
    };
    common::eventually("every node has the same", async || {
        (1..common::NODES).all(|node| stored(node) == stored(0))
    })
    .await;
    let written = stored(0);
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v2.txt");
        std::fs::write(path, &written).unwrap();
    } else {
        assert_eq!(written, GOLDEN, "the stored format has changed: see the head of this file");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_reads_format_2() {
    let Some(fleet) = Fleet::start() else { return };
    let time = redis_call(fleet.servers[0].addr(), &["TIME"]).unwrap();
    let now_us = format!("{}000000", time.lines().next().unwrap());
    for key in RedisKey::parse(&GOLDEN.replace("TIME", &now_us)) {
        let ttl = if key.key.ends_with(b":fence") { 0 } else { TTL.as_millis() as u64 };
        fleet.servers.iter().for_each(|server| key.restore(server.addr(), ttl));
    }
    let store = fleet.open("young_node=0s&max_ttl=60m&node_timeout=10s&timeout=20s").await;
    for (lock, reason) in [("held", None), ("revoked", Some("maintenance"))] {
        let view = store.inspect(&LockName::new(lock).unwrap()).await.unwrap().expect("the lock is held");
        let held = &view.held[0];
        assert_eq!(
            (held.fence.get().to_string(), held.holder.label.as_deref()),
            (now_us.clone(), Some("nightly"))
        );
        assert_eq!(held.revoked.as_deref(), reason, "{view:?}");
    }
    let resumed = take(&store, &fixed("held", 1)).await;
    assert_eq!(resumed.fence.get().to_string(), now_us, "the same attempt keeps its fence");
    for (lock, attempt) in [("held", 1), ("revoked", 2)] {
        let released = store.release(&fixed(lock, attempt).key).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released, "{lock}");
    }
}

/// The metadata of another version is ignored: the lock counts as another client's until its key is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_version_counts_as_another_client() {
    let Some(fleet) = Fleet::start() else { return };
    let store = fleet.open("young_node=0s&max_ttl=60m&node_timeout=10s&timeout=20s").await;
    let newer = GOLDEN.replace("TIME", "1700000000000000").replace(" v2%20", " v3%20");
    for key in RedisKey::parse(&newer).iter().filter(|key| key.key.ends_with(b"lock:held")) {
        fleet.servers.iter().for_each(|server| key.restore(server.addr(), TTL.as_millis() as u64));
    }
    let name = LockName::new("held").unwrap();
    let view = store.inspect(&name).await.unwrap().expect("the lock is held");
    let label = view.held[0].holder.label.as_deref();
    assert_eq!((view.held.len(), label), (1, Some("another Redis client")), "{view:?}");
    let mut other = fixed("held", 2);
    other.wait = lockkeeper_core::Wait::No;
    let refused = store.acquire(&other).await.unwrap();
    assert!(matches!(refused, AcquireOutcome::Busy(_)), "{refused:?}");
    // The key is gone, and the metadata stays for a moment: it belongs to no lock.
    for server in &fleet.servers {
        assert_eq!(redis_call(server.addr(), &["DEL", "lock:held"]).unwrap(), "1");
    }
    assert_eq!(store.inspect(&name).await.unwrap(), None);
    let taken = take(&store, &other).await;
    assert_eq!(store.inspect(&name).await.unwrap().expect("the lock is held").held[0].fence, taken.fence);
    assert_eq!(store.release(&taken.key).await.unwrap(), ReleaseOutcome::Released);
}
