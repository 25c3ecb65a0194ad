//! The stored format. `golden/format-0.txt` has all keys that this version leaves behind a plain hold, a revoked hold and a record: this version must write the same, and every later version must read them.
//!
//! If the format changes, raise `FORMAT` in `codec.rs`, keep this file for the version that is still read, and add one. `LOCKKEEPER_BLESS=1`
//! writes it.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{client_of, tell};
use lockkeeper_core::{Attempt, Expect, Holder, LockRequest, ReleaseOutcome, RequestKey};
use lockkeeper_testkit::laws::{give_back, is_free, name, request, take, with};
use lockkeeper_testkit::servers::{self, RedisKey, RedisOptions};

const GOLDEN: &str = include_str!("golden/format-0.txt");
const TTL: Duration = Duration::from_secs(600);
/// Where the four numbers of a hold stand that depend on the time: fence, end, start, end of the minimum hold.
const TIMES: std::ops::Range<usize> = 33..65;

/// A request that is the same in every run.
fn fixed(lock: &str, attempt: u8) -> LockRequest {
    let holder = Holder { host: "db-1".into(), pid: 7, label: Some("nightly".into()) };
    with(request(lock), |request| {
        request.key.attempt = Attempt::from_bytes([attempt; 16]);
        (request.holder, request.ttl) = (Arc::new(holder), TTL);
    })
}

/// Whether a part of a value is a hold: an attempt, flags, the times, and the terms of the request.
fn is_hold(part: &[u8]) -> bool {
    part.len() > 100 && part[..32].iter().all(u8::is_ascii_hexdigit)
}

/// The fence counter, and the version before the value of a record: 16 digits.
fn begins_with_time(part: &[u8]) -> bool {
    part.len() >= 16 && part[..16].iter().all(u8::is_ascii_digit)
}

/// Replaces the times.
fn without_times(mut keys: Vec<RedisKey>) -> Vec<RedisKey> {
    // Of this process, and not of the locks.
    keys.retain(|key| !String::from_utf8_lossy(&key.key).contains("client"));
    for part in keys.iter_mut().flat_map(|key| &mut key.parts) {
        if is_hold(part) {
            part[TIMES].fill(0);
        } else if begins_with_time(part) {
            part.splice(..16, *b"TIME");
        }
    }
    keys
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_writes_format_0() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    take(&store, &fixed("plain", 1)).await;
    take(&store, &fixed("revoked", 4)).await;
    store.revoke(&name("revoked"), "maintenance").await.unwrap();
    store.write(&name("config/a"), b"value", Expect::Absent, None).await.unwrap();
    let written = RedisKey::print(&without_times(RedisKey::all(server.addr())));
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/format-0.txt");
        std::fs::write(path, &written).unwrap();
    } else {
        assert_eq!(written, GOLDEN, "the stored format has changed: see the head of this file");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_reads_format_0() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let time = tell(server.addr(), &["TIME"]);
    let seconds: u64 = time.lines().next().unwrap().parse().unwrap();
    let (now_us, end_ms) = (seconds * 1_000_000, (seconds + TTL.as_secs()) * 1000);
    for mut key in RedisKey::parse(GOLDEN) {
        for part in &mut key.parts {
            if is_hold(part) {
                let times = [now_us as f64, end_ms as f64, now_us as f64, 0.0];
                part[TIMES].copy_from_slice(&times.map(f64::to_be_bytes).concat());
            } else if part.starts_with(b"TIME") {
                part.splice(..4, now_us.to_string().into_bytes());
            }
        }
        let is_lock = key.key.starts_with(b"lock:");
        key.restore(server.addr(), if is_lock { TTL.as_millis() as u64 } else { 0 });
    }
    let store = client_of(&server).await;
    for lock in ["plain", "revoked"] {
        let view = store.inspect(&name(lock)).await.unwrap().unwrap_or_else(|| panic!("{lock} is held"));
        assert_eq!(view.held.len(), 1, "{view:?}");
        assert!(view.held.iter().all(|held| held.holder.label.as_deref() == Some("nightly")), "{view:?}");
        assert!(view.held.iter().all(|held| held.fence.get() == now_us), "{view:?}");
    }
    let revoked = store.inspect(&name("revoked")).await.unwrap().unwrap();
    assert_eq!(revoked.held[0].revoked.as_deref(), Some("maintenance"));
    assert_eq!(store.read(&name("config/a")).await.unwrap().unwrap().value, b"value");
    // The attempt of each hold is the proof of ownership, also for a later version.
    let resumed = take(&store, &fixed("plain", 1)).await;
    assert_eq!(resumed.fence.get(), now_us, "the same attempt keeps its fence");
    for (lock, attempt) in [("plain", 1), ("revoked", 4)] {
        let key = RequestKey { attempt: Attempt::from_bytes([attempt; 16]), ..request(lock).key };
        assert_eq!(give_back(&store, &key).await, ReleaseOutcome::Released, "{lock} {attempt}");
    }
    is_free(&store, "plain").await;
}
