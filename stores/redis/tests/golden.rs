//! The stored format. `golden/format-1.txt` has the keys that this version leaves behind a plain hold, a revoked one, shared holds, permits,
//! a hold of two names by an owner, a queue, a record and a bucket: this version must write the same, and every later version must read them.
//!
//! If a layout changes, raise `FORMAT` in `codec.rs` by one, set the version of the layout in `codec.rs` and `lua/common.lua` to it, keep this
//! file, and add one, which `LOCKKEEPER_BLESS=1` writes. A hold or queue entry of another version is refused, and never misread.

mod common;
#[path = "common/fixture.rs"]
mod fixture;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, client_of, keeper, tell};
use fixture::{TTL, is_hold, is_of, restore, times_of, with_times, without_times};
use lockkeeper::limit::PER_HOUR;
use lockkeeper_core::{
    AcquireOutcome, Attempt, Error, Expect, Holder, LockRequest, Mode, Names, Owner, ReleaseOutcome,
    RenewOutcome, RequestKey, Result, Version, Wait,
};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, request, soon, take, with,
};
use lockkeeper_testkit::servers::{self, RedisKey, RedisOptions};

const GOLDEN: &str = include_str!("golden/format-1.txt");
/// The format before: its holds are the same, and its queue entry has no version and no claim.
const PREVIOUS: &str = include_str!("golden/format-0.txt");

/// A request that is the same in every run.
fn fixed(lock: &str, attempt: u8) -> LockRequest {
    let holder = Holder { host: "db-1".into(), pid: 7, label: Some("nightly".into()) };
    with(request(lock), |request| {
        request.key.attempt = Attempt::from_bytes([attempt; 16]);
        (request.holder, request.ttl) = (Arc::new(holder), TTL);
    })
}

/// The requests of the holds in hashes: two shared holds, a permit, and two names of one owner.
fn holds_in_hashes() -> [LockRequest; 4] {
    let shared = |attempt| LockRequest { mode: Mode::Shared, ..fixed("shared", attempt) };
    let permit = LockRequest { mode: Mode::Permit(3), ..fixed("permits", 7) };
    let mut owned = fixed("both/a", 8);
    owned.key.names = Names::new([name("both/a"), name("both/b")]).unwrap();
    owned.owner = Some(Owner::from_bytes([9; 16]));
    [shared(5), shared(6), permit, owned]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_writes_its_format() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    take(&store, &fixed("plain", 1)).await;
    take(&store, &fixed("revoked", 4)).await;
    store.revoke(&name("revoked"), "maintenance").await.unwrap();
    store.write(&name("config/a"), b"value", Expect::Absent, None).await.unwrap();
    assert!(is_allowed(&store).await);
    for request in &holds_in_hashes() {
        take(&store, request).await;
    }
    let waiting = LockRequest { wait: Wait::Forever, ..fixed("plain", 10) };
    let mut waits = Box::pin(store.acquire(&waiting));
    tokio::select! {
        outcome = &mut waits => panic!("{outcome:?}"),
        () = eventually("the request is queued", async || store.inspect(&name("plain")).await.unwrap().is_some_and(|view| view.waiting == 1)) => {}
    }
    let written = RedisKey::print(&without_times(RedisKey::all(server.addr())));
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/format-1.txt");
        std::fs::write(path, &written).unwrap();
    } else {
        assert_eq!(written, GOLDEN, "the stored format has changed: see the head of this file");
    }
}

/// Takes the only token of a bucket.
async fn is_allowed(store: &Client) -> bool {
    keeper(store).limit("mail").rate(1, PER_HOUR).burst(1).take(1).await.unwrap().allowed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_reads_its_format() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (now_us, end_ms) = times_of(&server);
    restore(&server, &with_times(RedisKey::parse(GOLDEN), now_us, end_ms));
    let store = client_of(&server).await;
    assert!(!is_allowed(&store).await, "the bucket is empty");
    let queue = store.inspect(&name("plain")).await.unwrap().unwrap().queue;
    assert_eq!(queue.len(), 1, "{queue:?}");
    assert_eq!((queue[0].holder.label.as_deref(), queue[0].since.as_micros()), (Some("nightly"), now_us));
    reads_holds(&store, now_us).await;
    // The release has granted the lock to the waiter of the fixture, whose process is gone.
    let view = store.inspect(&name("plain")).await.unwrap().unwrap();
    assert_eq!((view.held.len(), view.queue.len()), (1, 0), "{view:?}");
    assert!(view.held[0].fence.get() > now_us, "{view:?}");
    assert_eq!(view.held[0].holder.label.as_deref(), Some("nightly"), "{view:?}");
}

/// The release script used to take the bytes of such a queue entry for those of its own layout: the waiter was out of the queue, and the
/// lock was held for no caller.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_reads_the_format_before_and_leaves_its_waiter_alone() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (now_us, end_ms) = times_of(&server);
    restore(&server, &with_times(RedisKey::parse(PREVIOUS), now_us, end_ms));
    let store = client_of(&server).await;
    let before = RedisKey::print(&entries(&server));
    reads_holds(&store, now_us).await;
    assert_eq!(RedisKey::print(&entries(&server)), before, "a queue entry was changed");
    waits_behind_another_version(&server, &store).await;
}

/// The waiter at the front of the queue is of a process of the next version, while a fleet is updated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_of_the_next_format_is_left_alone() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (now_us, end_ms) = times_of(&server);
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mut keys = with_times(RedisKey::parse(GOLDEN), now_us, end_ms);
        keys.retain(|key| {
            ["client", "queue"].iter().any(|word| is_of(key, word)) || key.key.ends_with(b"waited")
        });
        for key in keys.iter_mut().filter(|key| is_of(key, "client")) {
            key.parts[1][0] += NEXT_FORMAT;
        }
        let store = client_of(&server).await;
        // The short way of a release, and the long one.
        let held = take(&store, &LockRequest { mode, ..request("plain") }).await;
        restore(&server, &keys);
        let before = RedisKey::print(&entries(&server));
        assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
        assert_eq!(RedisKey::print(&entries(&server)), before, "a queue entry was changed");
        waits_behind_another_version(&server, &store).await;
    }
}

/// A later layout of a record begins with a letter. A process of this version neither shows such a record, nor takes it for missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_of_another_format_is_refused() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    store.write(&name("config/a"), b"value", Expect::Absent, None).await.unwrap();
    let key = tell(server.addr(), &["KEYS", "lockkeeper:*record:*"]);
    let later = "v2:0000000000000007:value";
    tell(server.addr(), &["SET", &key, later]);
    store.read(&name("config/a")).await.expect_err("it cannot be read");
    for expect in [Expect::Absent, Expect::Version(Version(7))] {
        store.write(&name("config/a"), b"mine", expect, None).await.expect_err("it cannot be compared");
    }
    assert_eq!(tell(server.addr(), &["GET", &key]), later);
}

/// The queues and their entries.
fn entries(server: &servers::Server) -> Vec<RedisKey> {
    let mut keys = RedisKey::all(server.addr());
    keys.retain(|key| is_of(key, "client") || is_of(key, "queue"));
    keys
}

/// The lock is free, and the first waiter of its queue is of another version: no script grants the lock past that waiter until the
/// entries of its process have expired.
async fn waits_behind_another_version(server: &servers::Server, store: &Client) {
    let view = store.inspect(&name("plain")).await.unwrap().expect("a client waits");
    assert_eq!((view.held.len(), view.waiting), (0, 1), "{view:?}");
    let outcome = store.acquire(&request("plain")).await;
    assert!(matches!(outcome, Ok(AcquireOutcome::Busy(_))), "{outcome:?}");
    let waiter = join_queue(store, &request("plain"), 2).await;
    // Several polls.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(!waiter.is_finished(), "the lock was granted past the first waiter");
    let other =
        entries(server).into_iter().find(|key| key.key.ends_with(b"CLIENT")).expect("its entry is there");
    tell(server.addr(), &["DEL", std::str::from_utf8(&other.key).unwrap()]);
    let grant = granted(waiter).await;
    assert_eq!(give_back(store, &grant.key).await, ReleaseOutcome::Released);
    is_free(store, "plain").await;
}

/// The holds of a fixture are shown, belong to their attempts, and are released.
async fn reads_holds(store: &Client, now_us: u64) {
    for lock in ["plain", "revoked"] {
        let view = store.inspect(&name(lock)).await.unwrap().unwrap_or_else(|| panic!("{lock} is held"));
        assert_eq!(view.held.len(), 1, "{view:?}");
        assert!(view.held.iter().all(|held| held.holder.label.as_deref() == Some("nightly")), "{view:?}");
        assert!(view.held.iter().all(|held| held.fence.get() == now_us), "{view:?}");
    }
    let revoked = store.inspect(&name("revoked")).await.unwrap().unwrap();
    assert_eq!(revoked.held[0].revoked.as_deref(), Some("maintenance"));
    assert_eq!(store.read(&name("config/a")).await.unwrap().unwrap().value, b"value");
    for (lock, holders) in [("shared", 2), ("permits", 1), ("both/a", 1), ("both/b", 1)] {
        let view = store.inspect(&name(lock)).await.unwrap().unwrap_or_else(|| panic!("{lock} is held"));
        assert_eq!(view.held.len(), holders, "{view:?}");
        assert!(view.held.iter().all(|held| held.fence.get() == now_us), "{view:?}");
    }
    for request in &holds_in_hashes() {
        assert_eq!(take(store, request).await.fence.get(), now_us, "the same attempt keeps its fence");
        assert_eq!(give_back(store, &request.key).await, ReleaseOutcome::Released, "{:?}", request.key);
    }
    for lock in ["shared", "permits", "both/a", "both/b"] {
        is_free(store, lock).await;
    }
    // The attempt of each hold is the proof of ownership, also for a later version.
    let resumed = take(store, &fixed("plain", 1)).await;
    assert_eq!(resumed.fence.get(), now_us, "the same attempt keeps its fence");
    for (lock, attempt) in [("plain", 1), ("revoked", 4)] {
        let key = RequestKey { attempt: Attempt::from_bytes([attempt; 16]), ..request(lock).key };
        assert_eq!(give_back(store, &key).await, ReleaseOutcome::Released, "{lock} {attempt}");
    }
    is_free(store, "revoked").await;
}

/// The keys of the fixture with every hold in the format after this one.
fn of_the_next_format() -> Vec<RedisKey> {
    let mut keys = RedisKey::parse(GOLDEN);
    // Another process waits in no queue: the holds are what this is about.
    keys.retain(|key| !is_of(key, "client") && !is_of(key, "queue"));
    for part in keys.iter_mut().flat_map(|key| &mut key.parts).filter(|part| is_hold(part)) {
        part[32] += NEXT_FORMAT;
    }
    keys
}

/// Added to the flags of a hold, it is the next version of the format.
const NEXT_FORMAT: u8 = 16;

fn is_unsupported<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::Unsupported(_))), "{result:?}");
}

/// A request for other names that the store sends in one script with this one.
fn of_the_same_kind(held: &LockRequest, prefix: &str) -> LockRequest {
    let names = held.key.names.iter().map(|held| name(&format!("{prefix}/{held}")));
    let key = RequestKey { names: Names::new(names).unwrap(), ..request("x").key };
    LockRequest { key, ..held.clone() }
}

/// A waiter with an owner is in the queue when another process of the same owner, of the next version, gets a hold of the lock. The request
/// is refused then, and its queue entry used to stay for as long as the process polled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_meets_a_hold_of_the_next_format_leaves_its_queue() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let other = client_of(&server).await;
    let store = common::open(&format!("redis://{}?poll=100ms&claim=10m", server.addr())).await;
    let holder = with(request("jobs"), |request| request.owner = Some(Owner::from_bytes([1; 16])));
    take(&other, &holder).await;
    let owner = Owner::from_bytes([2; 16]);
    let waiter = join_queue(&store, &with(request("jobs"), |request| request.owner = Some(owner)), 1).await;
    // The index says that the waiter's owner has the hold, which is of the next format.
    let mut holds = RedisKey::all(server.addr()).into_iter().find(|key| is_of(key, "holds")).expect("a hash");
    let hold = holds.parts.iter_mut().find(|part| is_hold(part)).expect("the hold");
    hold[32] += NEXT_FORMAT;
    holds.parts.push(format!("o{}", "02".repeat(16)).into_bytes());
    holds.parts.push(holder.key.attempt.to_hex().into_bytes());
    tell(server.addr(), &["DEL", std::str::from_utf8(&holds.key).unwrap()]);
    holds.restore(server.addr(), TTL.as_millis() as u64);
    is_unsupported(soon("the waiter ends", waiter).await.unwrap());
    eventually("its queue entry is removed", || async { entries(&server).is_empty() }).await;
}

/// A process of this version beside one of the next, while a fleet is updated: it must neither misread a hold, nor end it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_of_the_next_format_is_refused() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (now_us, end_ms) = times_of(&server);
    restore(&server, &with_times(of_the_next_format(), now_us, end_ms));
    let store = client_of(&server).await;
    let locks = || RedisKey::all(server.addr()).into_iter().filter(|key| !key.key.ends_with(b":fence"));
    let before: Vec<_> = locks().collect();
    // A plain hold is one of another client.
    for (lock, attempt) in [("plain", 1), ("revoked", 4)] {
        let outcome = store.acquire(&fixed(lock, attempt)).await;
        assert!(matches!(outcome, Ok(AcquireOutcome::Busy(_))), "{lock}: {outcome:?}");
    }
    // A hold in a hash is found by its attempt, by its owner, and by the operator; and other requests of the same script go on.
    for held in &holds_in_hashes() {
        // The first request is in flight while the others gather in one batch.
        let [first, free] = ["first", "free"].map(|prefix| of_the_same_kind(held, prefix));
        let (granted, refused, granted_too) =
            tokio::join!(store.acquire(&first), store.acquire(held), store.acquire(&free));
        is_unsupported(refused);
        for granted in [granted, granted_too] {
            assert!(matches!(granted, Ok(AcquireOutcome::Granted(_))), "{granted:?}");
        }
        let (released, refused, released_too) =
            tokio::join!(store.release(&first.key), store.release(&held.key), store.release(&free.key));
        is_unsupported(refused);
        for released in [released, released_too] {
            assert_eq!(released.unwrap(), ReleaseOutcome::Released);
        }
        let mut same_owner = request(held.key.names.iter().next().unwrap().as_str());
        same_owner.owner = held.owner;
        match held.owner {
            Some(_) => is_unsupported(store.acquire(&same_owner).await),
            None => assert!(matches!(store.acquire(&same_owner).await, Ok(AcquireOutcome::Busy(_)))),
        }
    }
    for lock in ["shared", "permits", "both/a"] {
        is_unsupported(store.break_lock(&name(lock), "maintenance").await);
        is_unsupported(store.revoke(&name(lock), "maintenance").await);
    }
    assert_eq!(RedisKey::print(&locks().collect::<Vec<_>>()), RedisKey::print(&before), "a lock was changed");
}

/// The lease of a hold of the next format is over: only a process of that version knows what follows, such as a lock-delay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_hold_of_the_next_format_stays() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (now_us, _) = times_of(&server);
    let mut keys = of_the_next_format();
    keys.retain(|key| String::from_utf8_lossy(&key.key).contains("lock:shared"));
    restore(&server, &with_times(keys, now_us, now_us / 1000 - 1));
    let store = client_of(&server).await;
    let before = RedisKey::print(&RedisKey::all(server.addr()));
    let outcome = store.acquire(&request("shared")).await;
    assert!(matches!(outcome, Ok(AcquireOutcome::Busy(_))), "{outcome:?}");
    assert_eq!(RedisKey::print(&RedisKey::all(server.addr())), before, "the hold was ended");
}

/// A process of the next version has rewritten a hold of this process, for example to revoke it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_the_next_version_rewrote_is_lost() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    let shared = |lock| LockRequest { mode: Mode::Shared, ..request(lock) };
    let grants = [take(&store, &shared("rewritten")).await, take(&store, &shared("other")).await];
    let mut keys = RedisKey::all(server.addr());
    keys.retain(|key| is_of(key, "holds") && key.key.ends_with(b"rewritten"));
    for part in keys.iter_mut().flat_map(|key| &mut key.parts).filter(|part| is_hold(part)) {
        part[32] += NEXT_FORMAT;
    }
    restore(&server, &keys);
    assert_eq!(store.renew(&grants).await.unwrap(), [RenewOutcome::Lost, RenewOutcome::Renewed]);
}
