//! The stored format v1: keys that an earlier process wrote, read and released by today's code.

mod common;

use common::{ctl, open};
use lockkeeper_core::{Attempt, ReleaseOutcome, RequestKey};
use lockkeeper_testkit::laws::{is_free, name, request, take, with};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// The hashes of the attempts `[7; 16]` and `[8; 16]`, which name the keys.
const HOLDER: &str = "lock/golden/416f9a80e456a9b1775358addfb8381a";
const WAITER: &str = "lock/golden/d03a6e2e04f2c1df1c23e6900ea48f40";
const BASE: u64 = 1_700_000_000_000_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_of_format_v1_is_read_and_released() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let addr = server.addr();
    ctl(addr, &["put", "lock//fence-base", &format!("v1 {BASE}")]);
    ctl(addr, &["put", HOLDER, include_str!("golden/v1-granted.json").trim_end()]);
    ctl(addr, &["put", WAITER, include_str!("golden/v1-waiting.json").trim_end()]);
    ctl(addr, &["put", "lock//record:a%2Fb", "value"]);
    let store = open(addr).await;
    let view = store.inspect(&name("golden")).await.unwrap().expect("the lock is held");
    assert_eq!((view.held.len(), view.waiting), (1, 1), "{view:?}");
    assert_eq!((view.held[0].holder.host.as_str(), view.queue[0].holder.host.as_str()), ("host", "host"));
    assert_eq!(view.held[0].fence.get(), BASE + 3, "the base plus the revision of the write");
    assert_eq!(store.read(&name("a/b")).await.unwrap().expect("the record").value, b"value");
    let key = |byte| RequestKey { attempt: Attempt::from_bytes([byte; 16]), ..request("golden").key };
    let resumed = take(&store, &with(request("golden"), |request| request.key = key(7))).await;
    assert_eq!(resumed.fence, view.held[0].fence, "the same attempt resumes its grant");
    assert_eq!(store.release(&key(7)).await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(store.release(&key(8)).await.unwrap(), ReleaseOutcome::Released);
    is_free(&store, "golden").await;
    // Another format: the store must not grant beside processes that use it.
    ctl(addr, &["put", "lock//fence-base", "v2 1"]);
    assert!(store.acquire(&request("golden")).await.is_err(), "another format is not understood");
}
