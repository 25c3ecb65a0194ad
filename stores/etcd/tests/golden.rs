//! The stored format v1: keys that an earlier process wrote, read and released by today's code.

mod common;

use common::{ctl, open};
use lockkeeper_core::{Attempt, Mode, Names, Owner, ReleaseOutcome, RequestKey};
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

/// The key of the request that an earlier process wrote: the attempt `[7; 16]`.
fn earlier(names: &[&str]) -> RequestKey {
    let names = Names::new(names.iter().map(|text| name(text))).unwrap();
    RequestKey { names, attempt: Attempt::from_bytes([7; 16]) }
}

/// The kinds of entries that the first test does not have: several names, a key slot, a revoked hold, a re-entry, a
/// counted hold, shared holds, a lock-delay, and the rest of a minimum hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_kind_of_entry_of_format_v1_is_read() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let addr = server.addr();
    ctl(addr, &["put", "lock//fence-base", &format!("v1 {BASE}")]);
    for line in include_str!("golden/v1-kinds.txt").lines() {
        let (key, value) = line.split_once(' ').unwrap();
        ctl(addr, &["put", key, value]);
    }
    let store = open(addr).await;
    let view = async |text: &str| {
        store.inspect(&name(text)).await.unwrap().unwrap_or_else(|| panic!("{text} is free"))
    };
    let fence = BASE + 1;

    let revoked = view("revoked").await;
    assert_eq!(revoked.held[0].revoked.as_deref(), Some("maintenance"));
    assert_eq!(revoked.held[0].fence.get(), fence);
    let delayed = view("delayed").await;
    assert!(delayed.held.is_empty() && delayed.delayed_ms.is_some(), "{delayed:?}");
    let lingering = view("lingering").await;
    assert!(lingering.held[0].lingering && lingering.held[0].fence.get() == fence, "{lingering:?}");
    for text in
        ["revoked", "delayed", "lingering", "several/a", "several/b", "slot", "owned", "counted", "shared"]
    {
        let refused = store.acquire(&request(text)).await.unwrap();
        assert!(matches!(refused, lockkeeper_core::AcquireOutcome::Busy(_)), "{text}: {refused:?}");
    }

    let shared = view("shared").await;
    assert_eq!(shared.held.iter().map(|held| held.mode).collect::<Vec<_>>(), [Mode::Shared; 2]);
    let mine = with(request("shared"), |request| request.mode = Mode::Shared);
    assert!(take(&store, &mine).await.fence > shared.held[1].fence);
    assert_eq!(view("counted").await.held[0].mode, Mode::Permit(3));
    let inner =
        take(&store, &with(request("owned"), |request| request.owner = Some(Owner::from_bytes([9; 16]))))
            .await;
    assert_eq!(inner.fence.get(), fence, "a re-entry has the fence of its owner");

    let slot = view("slot").await.held[0].fence;
    let resumed = take(&store, &with(request("slot"), |request| request.key = earlier(&["slot"]))).await;
    assert_eq!(resumed.fence, slot, "the same attempt resumes its grant");
    for names in [&["several/a", "several/b"][..], &["slot"], &["revoked"]] {
        assert_eq!(store.release(&earlier(names)).await.unwrap(), ReleaseOutcome::Released, "{names:?}");
        for text in names {
            is_free(&store, text).await;
        }
    }
    for text in ["delayed", "lingering"] {
        store.break_lock(&name(text), "the old process is gone").await.unwrap();
        is_free(&store, text).await;
    }
}
