//! The stored format 2. `golden/items_v2.json` has an item of each kind that a program with format 2 wrote: this program must
//! write the same, and every later one must read them. If the first test fails, restore the format, or raise
//! `codec::FORMAT_VERSION` and add a file. `LOCKKEEPER_BLESS=1` writes it.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use common::{moto, open, sdk, table, url};
use lockkeeper_core::{
    Attempt, Error, Expect, Holder, LockRequest, Mode, Names, Owner, ReleaseOutcome, RenewOutcome,
    RequestKey, Store,
};
use lockkeeper_testkit::laws::{give_back, is_free, name, refused, request, take, with};

const GOLDEN: &str = include_str!("golden/items_v2.json");
const TTL: Duration = Duration::from_secs(600);

/// The attributes of an item, as `TYPE VALUE`. Bytes are one character and its count.
type Item = BTreeMap<String, String>;

fn fixed(texts: &[&str], attempt: u8) -> LockRequest {
    let holder = Holder { host: "db-1".into(), pid: 7, label: Some("nightly".into()) };
    let names = Names::new(texts.iter().map(|text| name(text))).unwrap();
    with(request(texts[0]), |request| {
        request.key = RequestKey { names, attempt: Attempt::from_bytes([attempt; 16]) };
        (request.holder, request.ttl) = (Arc::new(holder), TTL);
    })
}

/// Replaces each time, and each number that is made from one, by the word `TIME`.
fn without_times(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let digits = rest[start..].find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len() - start);
        let number = &rest[start..start + digits];
        out.push_str(&rest[..start]);
        out.push_str(if digits == 16 { "TIME" } else { number });
        rest = &rest[start + digits..];
    }
    out + rest
}

fn encode(value: &AttributeValue) -> String {
    match value {
        AttributeValue::S(text) if text.len() == 32 => format!("S {text}"),
        AttributeValue::S(text) => format!("S {}", without_times(text)),
        AttributeValue::N(number) => format!("N {}", without_times(number)),
        AttributeValue::B(bytes) => {
            let bytes = bytes.as_ref();
            let first = *bytes.first().expect("some bytes") as char;
            assert!(bytes.iter().all(|byte| *byte == first as u8), "another value");
            format!("B {first} {}", bytes.len())
        }
        other => panic!("an attribute of a type that the fixture has not: {other:?}"),
    }
}

/// The attribute, with this time in each place of one.
fn decode(text: &str, time: u64) -> AttributeValue {
    let (kind, value) = text.split_once(' ').unwrap();
    let value = value.replace("TIME", &time.to_string());
    match kind {
        "S" => AttributeValue::S(value),
        "N" => AttributeValue::N(value),
        _ => {
            let (byte, count) = value.split_once(' ').unwrap();
            AttributeValue::B(Blob::new(byte.repeat(count.parse().unwrap())))
        }
    }
}

async fn items(client: &Client, table: &str) -> BTreeMap<String, Item> {
    let found = client.scan().table_name(table).consistent_read(true).send().await.unwrap();
    let items = found.items.unwrap_or_default().into_iter();
    let encoded = items.map(|item| {
        let key = item["k"].as_s().unwrap().clone();
        (key, item.iter().map(|(name, value)| (name.clone(), encode(value))).collect())
    });
    encoded.collect()
}

async fn write_each_kind(store: &Arc<dyn Store>) {
    take(store, &fixed(&["held"], 1)).await;
    take(store, &fixed(&["several/a", "several/b"], 1)).await;
    take(store, &with(fixed(&["counted"], 1), |request| request.mode = Mode::Permit(3))).await;
    let owner = Owner::from_bytes([9; 16]);
    take(store, &with(fixed(&["owned"], 1), |request| request.owner = Some(owner))).await;
    take(store, &fixed(&["revoked"], 1)).await;
    store.revoke(&name("revoked"), "maintenance").await.unwrap();
    take(store, &with(fixed(&["delayed"], 1), |request| request.lock_delay = TTL)).await;
    store.break_lock(&name("delayed"), "stuck").await.unwrap();
    let lingering = with(fixed(&["lingering"], 1), |request| request.min_hold = TTL);
    take(store, &lingering).await;
    give_back(store, &lingering.key).await;
    take(store, &fixed(&["released"], 1)).await;
    give_back(store, &fixed(&["released"], 1).key).await;
    store.write(&name("short"), b"vvvvv", Expect::Absent, Some(TTL)).await.unwrap();
    store.write(&name("long"), &[b'v'; 700_000], Expect::Absent, None).await.unwrap();
    store.write(&name("deleted"), b"v", Expect::Absent, None).await.unwrap();
    store.delete(&name("deleted"), Expect::Any).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_program_writes_format_2() {
    let Some(server) = moto().await else { return };
    let table = table(server.addr()).await;
    write_each_kind(&open(&url(server.addr(), &table)).await).await;
    let mut items = items(&sdk(server.addr()).await, &table).await;
    // The rest of the minimum hold, in ms.
    let lingering = items.get_mut("lock/lingering").and_then(|item| item.get_mut("lock_state")).unwrap();
    let (before, after) = lingering.split_once("\"ms\":").unwrap();
    let rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
    *lingering = format!("{before}\"ms\":600000{rest}");
    let written = serde_json::to_string_pretty(&items).unwrap();
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/items_v2.json");
        std::fs::write(path, written + "\n").unwrap();
    } else {
        assert_eq!(written, GOLDEN.trim_end(), "the stored format has changed: see the head of this file");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn this_program_reads_format_2() {
    let Some(server) = moto().await else { return };
    let (table, client) = (table(server.addr()).await, sdk(server.addr()).await);
    // Every end in the fixture is this far away.
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let time = u64::try_from((since_1970 + TTL).as_micros()).unwrap();
    let golden: BTreeMap<String, Item> = serde_json::from_str(GOLDEN).unwrap();
    for item in golden.values() {
        let item = item.iter().map(|(name, value)| (name.clone(), decode(value, time))).collect();
        client.put_item().table_name(&table).set_item(Some(item)).send().await.unwrap();
    }
    let store = open(&url(server.addr(), &table)).await;
    let view = async |text: &str| {
        store.inspect(&name(text)).await.unwrap().unwrap_or_else(|| panic!("{text} is free"))
    };
    let held = view("held").await;
    assert_eq!(held.held[0].holder.label.as_deref(), Some("nightly"));
    assert_eq!(held.held[0].fence.get(), time);
    assert_eq!(view("counted").await.held[0].mode, Mode::Permit(3));
    assert_eq!(view("revoked").await.held[0].revoked.as_deref(), Some("maintenance"));
    let delayed = view("delayed").await;
    assert!(delayed.held.is_empty() && delayed.delayed_ms.is_some(), "{delayed:?}");
    assert!(view("lingering").await.held[0].lingering);
    for text in ["held", "several/a", "several/b", "counted", "owned", "revoked", "delayed", "lingering"] {
        refused(&store, &request(text)).await;
    }
    let owner = Owner::from_bytes([9; 16]);
    let inner = take(&store, &with(request("owned"), |request| request.owner = Some(owner))).await;
    assert_eq!(inner.fence.get(), time, "a re-entry has the fence of its owner");

    let resumed = take(&store, &fixed(&["held"], 1)).await;
    assert_eq!(resumed.fence.get(), time, "the same attempt keeps its fence");
    assert_eq!(store.renew(&[resumed]).await.unwrap(), [RenewOutcome::Renewed]);
    for names in [&["held"][..], &["several/a", "several/b"], &["revoked"]] {
        assert_eq!(give_back(&store, &fixed(names, 1).key).await, ReleaseOutcome::Released, "{names:?}");
        for text in names {
            is_free(&store, text).await;
        }
    }
    let next = take(&store, &request("released")).await;
    assert!(next.fence.get() > time, "the fence of a lock that is free counts");

    let read = async |key: &str| store.read(&name(key)).await.unwrap();
    assert_eq!(read("short").await.unwrap().value, b"vvvvv");
    assert_eq!(read("long").await.unwrap().value, [b'v'; 700_000]);
    assert_eq!(read("deleted").await, None);
    let lockkeeper_core::WriteOutcome::Written(version) =
        store.write(&name("deleted"), b"again", Expect::Absent, None).await.unwrap()
    else {
        panic!("there is no record")
    };
    assert!(version.0 > time, "the version of a deleted record is not used again");
}

/// An item of another version is neither read nor written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_of_another_format_is_refused() {
    let Some(server) = moto().await else { return };
    let (table, client) = (table(server.addr()).await, sdk(server.addr()).await);
    for key in ["lock/x", "record/x"] {
        let item = [("k", AttributeValue::S(key.into())), ("rev", AttributeValue::N("1".into()))];
        let item = item.into_iter().chain([("format", AttributeValue::N("3".into()))]);
        let item = item.map(|(name, value)| (name.to_owned(), value)).collect();
        client.put_item().table_name(&table).set_item(Some(item)).send().await.unwrap();
    }
    let before = items(&client, &table).await;
    let store = open(&url(server.addr(), &table)).await;
    let answers = [
        store.acquire(&request("x")).await.map(drop),
        store.break_lock(&name("x"), "why").await.map(drop),
        store.read(&name("x")).await.map(drop),
        store.write(&name("x"), b"v", Expect::Any, None).await.map(drop),
        store.delete(&name("x"), Expect::Any).await.map(drop),
    ];
    for (i, answer) in answers.iter().enumerate() {
        assert!(matches!(answer, Err(Error::Unsupported(_))), "{i}: {answer:?}");
    }
    assert_eq!(items(&client, &table).await, before);
}
