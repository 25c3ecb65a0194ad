//! The stored formats. `golden/v1.json` contains the nodes of a hold, a waiter and a record that a program with format 1
//! wrote, and `golden/v1-kinds.json` those of every other kind: this program must read them, and must write the same. If a
//! test of what it writes fails, either restore the format, or raise `codec::FORMAT`, keep this file for what is still
//! read, and add one for the new version. `LOCKKEEPER_BLESS=1` writes the files.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open};
use futures_util::StreamExt;
use lockkeeper_core::{
    Attempt, Event, EventKind, EventStream, Expect, Holder, LockRequest, Mode, Names, Owner, ReleaseOutcome,
    RenewOutcome, RequestKey, Store, Wait,
};
use lockkeeper_testkit::laws::{
    give_back, granted, is_free, join_queue, name, refused, request, soon, take, with,
};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};
use zookeeper_client::{Acls, Client, CreateMode};

const GOLDEN: &str = include_str!("golden/v1.json");
const KINDS: &str = include_str!("golden/v1-kinds.json");
/// The length of a record that needs two chunks.
const LONG_RECORD: usize = (512 << 10) + 1;

/// The fences in the fixtures.
const FENCE: u64 = 1_700_000_000_000_000;

/// One stored node: its path without the numbers that ZooKeeper chooses, and its content without times.
type StoredNode = (String, String);

fn fixed(text: &str, attempt: u8) -> LockRequest {
    fixed_all(&[text], attempt)
}

fn fixed_all(texts: &[&str], attempt: u8) -> LockRequest {
    let holder = Holder { host: "db-1".into(), pid: 7, label: Some("nightly".into()) };
    let names = Names::new(texts.iter().map(|text| name(text))).unwrap();
    with(request(texts[0]), |request| {
        request.key = RequestKey { names, attempt: Attempt::from_bytes([attempt; 16]) };
        (request.holder, request.ttl) = (Arc::new(holder), Duration::from_secs(600));
    })
}

/// Replaces the values that differ from run to run: a sequence number at the end of a path, fences and times, and the
/// random names of chunks, whose content is replaced by its length.
fn normalize(path: &str, data: &[u8]) -> StoredNode {
    if let Some((dir, chunk)) = path.rsplit_once("/c-") {
        assert!(data.iter().all(|byte| *byte == b'x'), "{chunk}: another value");
        return (format!("{dir}/chunk{}", &chunk[16..]), format!("{} bytes", data.len()));
    }
    let stem = path.trim_end_matches(|c: char| c.is_ascii_digit());
    let path = if path.len() - stem.len() >= 10 { format!("{stem}SEQUENCE") } else { path.to_owned() };
    let mut data = String::from_utf8_lossy(data).into_owned();
    for field in ["since_us", "fence", "duration_ms"] {
        let key = format!("\"{field}\":");
        let Some((before, after)) = data.split_once(&key) else { continue };
        let rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
        let value: u64 = after[..after.len() - rest.len()].parse().unwrap();
        let value = match field {
            // The rest of a minimum hold.
            "duration_ms" if data.contains("lingering") => value.next_multiple_of(100_000),
            "duration_ms" => value,
            _ => FENCE,
        };
        data = format!("{before}{key}{value}{rest}");
    }
    // The names of chunks in the header of a record.
    while let Some(at) = data.find("\"c-") {
        data.replace_range(at..at + 19, "\"chunk");
    }
    (path, data)
}

async fn stored(admin: &Client) -> Vec<StoredNode> {
    let mut nodes = Vec::new();
    for path in common::tree(admin, "/lock").await {
        let parts: Vec<&str> = path.split('/').collect();
        // A sweep in the background writes this node at any moment; its content is for other sweeps only.
        if parts.get(2) == Some(&"=sweep") {
            continue;
        }
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

/// Writes a node of each kind that `golden/v1.json` does not have.
async fn write_each_kind(store: &Arc<dyn Store>, other: &Arc<dyn Store>) {
    for attempt in [1, 2] {
        take(store, &with(fixed("shared", attempt), |request| request.mode = Mode::Shared)).await;
    }
    take(store, &with(fixed("counted", 1), |request| request.mode = Mode::Permit(3))).await;
    take(store, &fixed_all(&["several/a", "several/b"], 1)).await;
    let owner = Owner::from_bytes([9; 16]);
    for attempt in [1, 2] {
        take(store, &with(fixed("owned", attempt), |request| request.owner = Some(owner))).await;
    }
    take(store, &fixed("revoked", 1)).await;
    store.revoke(&name("revoked"), "maintenance").await.unwrap();
    let delay = Duration::from_secs(1200);
    take(store, &with(fixed("guarded", 1), |request| request.lock_delay = delay)).await;
    take(store, &with(fixed("delayed", 1), |request| request.lock_delay = delay)).await;
    store.break_lock(&name("delayed"), "stuck").await.unwrap();
    let lingering = with(fixed("lingering", 1), |request| request.min_hold = Duration::from_secs(600));
    take(store, &lingering).await;
    assert_eq!(give_back(store, &lingering.key).await, ReleaseOutcome::Released);
    let long = vec![b'x'; LONG_RECORD];
    store.write(&name("long"), &long, Expect::Absent, Some(Duration::from_secs(600))).await.unwrap();
    let mut events = other.watch("").await.unwrap();
    take(store, &fixed("watched", 1)).await;
    next_event(&mut events, "watched").await;
}

async fn next_event(events: &mut EventStream, text: &str) -> Event {
    let event = soon("the event arrives", events.next()).await.expect("the stream is open").unwrap();
    assert_eq!(event.name, name(text), "{event:?}");
    event
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_program_writes_each_kind_of_format_1() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let admin = admin(server.addr()).await;
    write_each_kind(&store, &other).await;
    let written = serde_json::to_string_pretty(&stored(&admin).await).unwrap();
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
        std::fs::write(format!("{dir}/v1-kinds.json"), written.clone() + "\n").unwrap();
    } else {
        assert_eq!(written, KINDS.trim_end(), "the stored format has changed: see the head of this file");
    }
}

/// Creates the nodes of the fixture. The entries are those of a session that lives.
async fn create_each_kind(client: &Client) {
    let mut nodes: Vec<StoredNode> = serde_json::from_str(KINDS).unwrap();
    // The fixture is sorted by path. An entry that was granted by its position came first, and a re-entry after the hold.
    nodes.sort_by_key(|(_, data)| {
        (data.contains("\"state\":\"granted\""), data.contains("\"fence\":") && data.contains("\"owner\":"))
    });
    for (path, data) in nodes {
        let bytes = match data.strip_suffix(" bytes") {
            Some(length) => vec![b'x'; length.parse().unwrap()],
            None => data.into_bytes(),
        };
        let (path, mode) = match path.strip_suffix("SEQUENCE") {
            Some(stem) => (stem, CreateMode::EphemeralSequential),
            None => (path.as_str(), CreateMode::Persistent),
        };
        client.create(path, &bytes, &mode.with_acls(Acls::anyone_all())).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_program_reads_each_kind_of_format_1() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let client = admin(server.addr()).await;
    create_each_kind(&client).await;
    let store = open(server.addr()).await;
    let view = async |text: &str| {
        store.inspect(&name(text)).await.unwrap().unwrap_or_else(|| panic!("{text} is free"))
    };
    let shared = view("shared").await;
    assert_eq!(shared.held.iter().map(|held| held.mode).collect::<Vec<_>>(), [Mode::Shared; 2]);
    assert_eq!(view("counted").await.held[0].mode, Mode::Permit(3));
    let owned = view("owned").await;
    assert_eq!(owned.held.len(), 2, "{owned:?}");
    assert_eq!(owned.held[1].fence.get(), FENCE, "a re-entry has the fence of its owner");
    let revoked = view("revoked").await;
    assert_eq!(revoked.held[0].revoked.as_deref(), Some("maintenance"));
    assert_eq!(revoked.held[0].fence.get(), FENCE);
    let delayed = view("delayed").await;
    assert!(delayed.held.is_empty() && delayed.delayed_ms > Some(600_000), "{delayed:?}");
    let lingering = view("lingering").await;
    assert!(lingering.held[0].lingering && lingering.held[0].fence.get() == FENCE, "{lingering:?}");
    for text in
        ["shared", "counted", "several/a", "several/b", "owned", "revoked", "guarded", "delayed", "lingering"]
    {
        refused(&store, &request(text)).await;
    }
    let mine = take(&store, &with(fixed("shared", 3), |request| request.mode = Mode::Shared)).await;
    assert_eq!(store.renew(std::slice::from_ref(&mine)).await.unwrap(), [RenewOutcome::Renewed]);
    assert_eq!(give_back(&store, &mine.key).await, ReleaseOutcome::Released);
    let long = store.read(&name("long")).await.unwrap().expect("the record");
    assert_eq!(long.value, vec![b'x'; LONG_RECORD]);
    // One break ends the hold under all its names.
    for text in ["several/b", "delayed", "lingering", "counted"] {
        store.break_lock(&name(text), "the old program is gone").await.unwrap();
    }
    for text in ["several/a", "several/b", "delayed", "lingering", "counted"] {
        is_free(&store, text).await;
    }
    // The events of the old program come after those that the watch has missed.
    let mut events = store.watch("").await.unwrap();
    let (path, data) = event_of_the_fixture();
    let mode = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    client.create(&path, data.as_bytes(), &mode).await.unwrap();
    let event = next_event(&mut events, "watched").await;
    assert!(matches!(event.kind, EventKind::Granted { .. }), "{event:?}");
    assert_eq!(event.holder.and_then(|holder| holder.label).as_deref(), Some("nightly"));
}

fn event_of_the_fixture() -> StoredNode {
    let nodes: Vec<StoredNode> = serde_json::from_str(KINDS).unwrap();
    let found =
        nodes.into_iter().find_map(|(path, data)| Some((path.strip_suffix("e-SEQUENCE")?.to_owned(), data)));
    let (dir, data) = found.expect("an event");
    (format!("{dir}e-"), data)
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
