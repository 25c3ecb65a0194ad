//! The stored format. `golden/format-0.txt` has the keys that this version leaves behind a plain hold, a revoked one, shared holds, permits,
//! a hold of two names by an owner, a queue and a record: this version must write the same, and every later version must read them.
//!
//! If the format changes, raise `FORMAT` in `codec.rs` and in `lua/common.lua` by one, keep this file for the version that is still read, and
//! add one. `LOCKKEEPER_BLESS=1` writes it. A hold of another version is refused, and never misread.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{client_of, tell};
use lockkeeper_core::{
    AcquireOutcome, Attempt, Error, Expect, Holder, LockRequest, Mode, Names, Owner, ReleaseOutcome,
    RenewOutcome, RequestKey, Result, Wait,
};
use lockkeeper_testkit::laws::{eventually, give_back, is_free, name, request, take, with};
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

/// Where the counts of a lock's holds have the time at which they were written: behind the sign of a long number.
fn time_of_counts(part: &[u8]) -> std::ops::Range<usize> {
    let sign = part.iter().position(|byte| *byte == 0xcf).expect("the counts have a time");
    sign + 1..sign + 9
}

/// The client id of the fixture, which is another one in each run.
const CLIENT: &[u8] = b"CLIENT";

/// Replaces the client id.
fn replace_client(keys: &mut [RedisKey], from: &[u8], to: &[u8]) {
    let replaced = |bytes: &[u8]| {
        let at = bytes.windows(from.len()).position(|window| window == from);
        at.map_or(bytes.to_vec(), |at| [&bytes[..at], to, &bytes[at + from.len()..]].concat())
    };
    for key in keys {
        key.key = replaced(&key.key);
        key.parts.iter_mut().for_each(|part| *part = replaced(part));
    }
}

/// Whether the key has this word: `holds`, `ends`, `queue`, `client`.
fn is_of(key: &RedisKey, word: &str) -> bool {
    String::from_utf8_lossy(&key.key).contains(&format!("}}:{word}:"))
}

/// Calls `change` with each value that depends on the time, and its kind.
fn each_time(keys: &mut [RedisKey], mut change: impl FnMut(StoredTime, &mut Vec<u8>)) {
    for key in keys {
        let (scores, counts) = (key.kind == "zset", is_of(key, "holds"));
        let (ends, queues) = (is_of(key, "ends"), is_of(key, "client"));
        let numbered = is_of(key, "record") || key.key.ends_with(b":fence");
        for i in 0..key.parts.len() {
            let of_counts = counts && i % 2 == 1 && key.parts[i - 1] == b"#";
            let part = &mut key.parts[i];
            match () {
                () if scores && i % 2 == 1 => {
                    change(if ends { StoredTime::Ends } else { StoredTime::Digits }, part)
                }
                () if of_counts => change(StoredTime::Counts, part),
                () if queues && i % 2 == 1 => change(StoredTime::Entry, part),
                () if is_hold(part) => change(StoredTime::Hold, part),
                () if numbered && (begins_with_time(part) || part.starts_with(b"TIME")) => {
                    change(StoredTime::Digits, part)
                }
                () => {}
            }
        }
    }
}

/// The values that depend on the time.
enum StoredTime {
    /// The end of a lease in milliseconds, as a score.
    Ends,
    /// Microseconds in digits, in front of the rest.
    Digits,
    /// The instant in the counts of a lock's holds.
    Counts,
    /// The start of the wait in a queue entry.
    Entry,
    Hold,
}

/// Replaces the times.
fn without_times(mut keys: Vec<RedisKey>) -> Vec<RedisKey> {
    let client = keys.iter().find(|key| is_of(key, "client")).expect("a client waits").key.clone();
    let id = client.rsplit(|byte| *byte == b':').next().expect("the id").to_vec();
    replace_client(&mut keys, &id, CLIENT);
    each_time(&mut keys, |time, part| match time {
        StoredTime::Ends => *part = b"END".to_vec(),
        StoredTime::Digits => drop(part.splice(..16, *b"TIME")),
        StoredTime::Counts => {
            let time = time_of_counts(part);
            part[time].fill(0);
        }
        StoredTime::Entry => part[1..9].fill(0),
        StoredTime::Hold => part[TIMES].fill(0),
    });
    keys
}

/// Puts times into the fixture.
fn with_times(mut keys: Vec<RedisKey>, now_us: u64, end_ms: u64) -> Vec<RedisKey> {
    each_time(&mut keys, |time, part| match time {
        StoredTime::Ends => *part = end_ms.to_string().into_bytes(),
        StoredTime::Digits => drop(part.splice(..4, now_us.to_string().into_bytes())),
        StoredTime::Counts => {
            let time = time_of_counts(part);
            part[time].copy_from_slice(&(now_us / 1000).to_be_bytes());
        }
        StoredTime::Entry => part[1..9].copy_from_slice(&(now_us as f64).to_be_bytes()),
        StoredTime::Hold => {
            let times = [now_us as f64, end_ms as f64, now_us as f64, 0.0];
            part[TIMES].copy_from_slice(&times.map(f64::to_be_bytes).concat());
        }
    });
    keys
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

/// The time of a server in microseconds, and the end of a lease from now in milliseconds.
fn times_of(server: &servers::Server) -> (u64, u64) {
    let time = tell(server.addr(), &["TIME"]);
    let seconds: u64 = time.lines().next().unwrap().parse().unwrap();
    (seconds * 1_000_000, (seconds + TTL.as_secs()) * 1000)
}

/// Writes keys to a server: the counter and records for ever, the rest with a time to live.
fn restore(server: &servers::Server, keys: &[RedisKey]) {
    for key in keys {
        let lives = !is_of(key, "record") && !key.key.ends_with(b":fence");
        key.restore(server.addr(), if lives { TTL.as_millis() as u64 } else { 0 });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_writes_format_0() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    take(&store, &fixed("plain", 1)).await;
    take(&store, &fixed("revoked", 4)).await;
    store.revoke(&name("revoked"), "maintenance").await.unwrap();
    store.write(&name("config/a"), b"value", Expect::Absent, None).await.unwrap();
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
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/format-0.txt");
        std::fs::write(path, &written).unwrap();
    } else {
        assert_eq!(written, GOLDEN, "the stored format has changed: see the head of this file");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_version_reads_format_0() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (now_us, end_ms) = times_of(&server);
    restore(&server, &with_times(RedisKey::parse(GOLDEN), now_us, end_ms));
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
    for (lock, holders) in [("shared", 2), ("permits", 1), ("both/a", 1), ("both/b", 1)] {
        let view = store.inspect(&name(lock)).await.unwrap().unwrap_or_else(|| panic!("{lock} is held"));
        assert_eq!(view.held.len(), holders, "{view:?}");
        assert!(view.held.iter().all(|held| held.fence.get() == now_us), "{view:?}");
    }
    let queue = store.inspect(&name("plain")).await.unwrap().unwrap().queue;
    assert_eq!(queue.len(), 1, "{queue:?}");
    assert_eq!((queue[0].holder.label.as_deref(), queue[0].since.as_micros()), (Some("nightly"), now_us));
    for request in &holds_in_hashes() {
        assert_eq!(take(&store, request).await.fence.get(), now_us, "the same attempt keeps its fence");
        assert_eq!(give_back(&store, &request.key).await, ReleaseOutcome::Released, "{:?}", request.key);
    }
    for lock in ["shared", "permits", "both/a", "both/b"] {
        is_free(&store, lock).await;
    }
    // The attempt of each hold is the proof of ownership, also for a later version.
    let resumed = take(&store, &fixed("plain", 1)).await;
    assert_eq!(resumed.fence.get(), now_us, "the same attempt keeps its fence");
    for (lock, attempt) in [("plain", 1), ("revoked", 4)] {
        let key = RequestKey { attempt: Attempt::from_bytes([attempt; 16]), ..request(lock).key };
        assert_eq!(give_back(&store, &key).await, ReleaseOutcome::Released, "{lock} {attempt}");
    }
    is_free(&store, "revoked").await;
    // The release has granted the lock to the waiter of the fixture, whose process is gone.
    let view = store.inspect(&name("plain")).await.unwrap().unwrap();
    assert_eq!((view.held.len(), view.queue.len()), (1, 0), "{view:?}");
    assert!(view.held[0].fence.get() > now_us, "{view:?}");
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
