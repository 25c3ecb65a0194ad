//! DynamoDB: the laws, the mark in the user's own items, and values with a mark.
#![cfg(feature = "dynamodb")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::dynamodb::aws_sdk_dynamodb::Client;
use lockkeeper_fenced::dynamodb::aws_sdk_dynamodb::config::{BehaviorVersion, Config, Credentials, Region};
use lockkeeper_fenced::dynamodb::aws_sdk_dynamodb::primitives::Blob;
use lockkeeper_fenced::dynamodb::aws_sdk_dynamodb::types::AttributeValue::{self, B, N, S};
use lockkeeper_fenced::dynamodb::aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType,
};
use lockkeeper_fenced::dynamodb::{DynamoFenced, Guarded, MARK, verdict};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use lockkeeper_testkit::servers::{self, Server};

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

fn client(addr: &str) -> Client {
    let config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .region(Region::new("eu-central-1"))
        .credentials_provider(Credentials::new("test", "secret", None, None, "a test"))
        .endpoint_url(format!("http://{addr}"));
    Client::from_conf(config.build())
}

async fn start() -> Option<(Server, Client)> {
    let server = tokio::task::spawn_blocking(servers::moto).await.unwrap().ok()?;
    let client = client(&server.addr().to_string());
    make_table(&client, "orders").await;
    Some((server, client))
}

async fn make_table(client: &Client, name: &str) {
    let key = KeySchemaElement::builder().attribute_name("id").key_type(KeyType::Hash).build().unwrap();
    let id =
        AttributeDefinition::builder().attribute_name("id").attribute_type(ScalarAttributeType::S).build();
    let make = client.create_table().table_name(name).key_schema(key).attribute_definitions(id.unwrap());
    make.billing_mode(BillingMode::PayPerRequest).send().await.unwrap();
}

/// What people do without a fence.
struct Plain(Client, String);

#[async_trait]
impl Fenced for Plain {
    async fn put(&self, resource: &str, _: Fence, value: &[u8]) -> Result<()> {
        let put = self.0.put_item().table_name(&self.1).item("id", S(resource.into()));
        put.item("value", B(Blob::new(value))).send().await.unwrap();
        Ok(())
    }

    async fn delete(&self, resource: &str, _: Fence) -> Result<()> {
        self.0.delete_item().table_name(&self.1).key("id", S(resource.into())).send().await.unwrap();
        Ok(())
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let get = self.0.get_item().table_name(&self.1).key("id", S(resource.into())).consistent_read(true);
        let Some(item) = get.send().await.unwrap().item else { return Ok(None) };
        let value = item["value"].as_b().unwrap().as_ref().to_vec();
        Ok(Some(GuardedValue { fence: Fence::MIN, value: Some(value) }))
    }
}

/// A table for each law, on a server that lives for as long as a law uses it.
struct Table(Arc<Server>, String);

fn shared() -> Option<Arc<Server>> {
    static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(running) = shared.upgrade() {
        return Some(running);
    }
    let started = Arc::new(servers::moto().ok()?);
    *shared = Arc::downgrade(&started);
    Some(started)
}

#[async_trait]
impl FencedHarness for Table {
    /// The server answers some 200 requests in a second.
    const INTERLEAVINGS: u64 = 25;

    async fn start() -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("table-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let server = tokio::task::spawn_blocking(shared).await.unwrap()?;
        make_table(&client(&server.addr().to_string()), &name).await;
        Some(Table(server, name))
    }

    fn address(&self) -> String {
        format!("{} {}", self.0.addr(), self.1)
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        let (addr, table) = address.split_once(' ').unwrap();
        Arc::new(DynamoFenced::new(client(addr), table, "id"))
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        let (addr, table) = address.split_once(' ').unwrap();
        Arc::new(Plain(client(addr), table.into()))
    }
}

mod laws {
    use super::*;
    lockkeeper_testkit::fenced_laws!(Table);
}

fn stale<T: std::fmt::Debug>(answer: &Result<T>, presented: u64, seen: u64) {
    match answer {
        Err(Error::Stale { presented: p, seen: s }) => assert_eq!((p.get(), s.get()), (presented, seen)),
        other => panic!("it was to be stale: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_writer_changes_nothing() {
    let Some((_server, client)) = start().await else { return };
    let nowhere = DynamoFenced::new(client.clone(), "nowhere", "id");
    let values = DynamoFenced::new(client, "orders", "id");
    assert_eq!(values.read("x").await.unwrap(), None);
    values.put("x", fence(9), b"new\0\xff").await.unwrap();
    stale(&values.put("x", fence(8), b"late").await, 8, 9);
    stale(&values.delete("x", fence(1)).await, 1, 9);
    let seen = values.read("x").await.unwrap();
    assert_eq!(seen, Some(GuardedValue { fence: fence(9), value: Some(b"new\0\xff".to_vec()) }));
    // The same fence again is the same writer. A deleted value keeps its mark.
    values.put("x", fence(9), b"").await.unwrap();
    values.delete("x", fence(9)).await.unwrap();
    values.delete("y", fence(3)).await.unwrap();
    stale(&values.put("x", fence(8), b"late").await, 8, 9);
    assert_eq!(values.read("x").await.unwrap(), Some(GuardedValue { fence: fence(9), value: None }));
    assert_eq!(values.read("y").await.unwrap(), Some(GuardedValue { fence: fence(3), value: None }));
    // Bad input.
    assert!(matches!(values.put("", fence(9), b"").await, Err(Error::Invalid(_))));
    assert!(matches!(values.put("x", fence(9), &vec![0; 500_000]).await, Err(Error::Limited(_))));
    assert!(matches!(nowhere.put("x", fence(1), b"").await, Err(Error::Invalid(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_at_once_the_newest_stays() {
    let Some((_server, client)) = start().await else { return };
    let values = Arc::new(DynamoFenced::new(client, "orders", "id"));
    let mut writers = Vec::new();
    for n in 1..=40u64 {
        let values = values.clone();
        // In no order.
        let n = n * 17 % 41;
        writers.push(tokio::spawn(
            async move { (n, values.put("x", fence(n), n.to_string().as_bytes()).await) },
        ));
    }
    let mut newest_was_taken = false;
    for writer in writers {
        match writer.await.unwrap() {
            (n, Ok(())) => newest_was_taken |= n == 40,
            (n, Err(Error::Stale { seen, .. })) => assert!(seen > fence(n)),
            (n, other) => panic!("{n}: {other:?}"),
        }
    }
    assert!(newest_was_taken);
    assert_eq!(values.read("x").await.unwrap().unwrap().value, Some(b"40".to_vec()));
}

async fn order(client: &Client) -> Option<std::collections::HashMap<String, AttributeValue>> {
    let get = client.get_item().table_name("orders").key("id", S("42".into())).consistent_read(true);
    get.send().await.unwrap().item
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_users_own_writes_are_checked() {
    let Some((_server, client)) = start().await else { return };
    let put = |state: &str| {
        client.put_item().table_name("orders").item("id", S("42".into())).item("state", S(state.into()))
    };
    let update = || client.update_item().table_name("orders").key("id", S("42".into()));
    let paid = || {
        let update = update().update_expression("SET #state = :to REMOVE note");
        update
            .expression_attribute_names("#state", "state")
            .expression_attribute_values(":to", S("paid".into()))
    };
    verdict(put("open").fenced(fence(5)).send().await, fence(5)).unwrap().unwrap();
    verdict(paid().fenced(fence(7)).send().await, fence(7)).unwrap().unwrap();
    stale(&verdict(put("open").fenced(fence(6)).send().await, fence(6)), 6, 7);
    stale(&verdict(paid().fenced(fence(6)).send().await, fence(6)), 6, 7);
    let item = order(&client).await.unwrap();
    assert_eq!((&item["state"], &item[MARK]), (&S("paid".into()), &N("7".into())));
    // A condition of the user's own stays, and is told apart from the fence.
    let only_open = || {
        let paid = paid().condition_expression("#state = :open");
        paid.expression_attribute_values(":open", S("open".into()))
    };
    let refused = verdict(only_open().fenced(fence(8)).send().await, fence(8)).unwrap();
    assert!(refused.unwrap_err().into_service_error().is_conditional_check_failed_exception());
    stale(&verdict(only_open().fenced(fence(6)).send().await, fence(6)), 6, 7);
    assert_eq!(order(&client).await.unwrap()[MARK], N("7".into()), "a write that was refused left its mark");
    // Without an update of its own, it raises the mark.
    verdict(update().fenced(fence(9)).send().await, fence(9)).unwrap().unwrap();
    assert_eq!(order(&client).await.unwrap()[MARK], N("9".into()));
    let delete = || client.delete_item().table_name("orders").key("id", S("42".into()));
    stale(&verdict(delete().fenced(fence(8)).send().await, fence(8)), 8, 9);
    verdict(delete().fenced(fence(9)).send().await, fence(9)).unwrap().unwrap();
    assert_eq!(order(&client).await, None);
}

const BUSY: &str = r#"{"__type":"com.amazonaws.dynamodb.v20120810#ThrottlingException","message":"busy"}"#;

/// A server that takes a write and hangs up without an answer, and then refuses each one with this body.
fn hangs_up_once(body: &'static str) -> std::net::SocketAddr {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for (nth, stream) in listener.incoming().enumerate() {
            let (mut stream, mut heard, mut some) = (stream.unwrap(), Vec::new(), [0; 4096]);
            // The body is JSON, and nothing follows it.
            while !heard.ends_with(b"}") {
                match stream.read(&mut some) {
                    Ok(0) | Err(_) => break,
                    Ok(n) => heard.extend_from_slice(&some[..n]),
                }
            }
            if nth > 0 {
                let head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/x-amz-json-1.0\r\nConnection: close";
                let _ = write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            }
        }
    });
    addr
}

/// The SDK sent it again by itself, and the last answer said that nothing had happened.
#[tokio::test]
async fn a_write_that_may_have_been_done_is_unknown_whatever_the_last_try_says() {
    let values = DynamoFenced::new(client(&hangs_up_once(BUSY).to_string()), "orders", "id");
    let told = values.put("a", fence(5), b"x").await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    // Each later one is refused from the first try on.
    let told = values.put("a", fence(5), b"x").await;
    assert!(matches!(told, Err(Error::Limited(_))), "{told:?}");
}

/// The first try may have been done before the higher fence came: "stale, nothing has changed" would be false.
#[tokio::test]
async fn a_write_that_may_have_been_done_before_it_was_overtaken_is_unknown() {
    const OVERTAKEN: &str = r#"{"__type":"com.amazonaws.dynamodb.v20120810#ConditionalCheckFailedException",
        "message":"refused","Item":{"id":{"S":"a"},"lockkeeper_fence":{"N":"6"}}}"#;
    let values = DynamoFenced::new(client(&hangs_up_once(OVERTAKEN).to_string()), "orders", "id");
    let told = values.put("a", fence(5), b"x").await;
    assert!(matches!(told, Err(Error::Unknown(_))), "{told:?}");
    stale(&values.put("a", fence(5), b"x").await, 5, 6);
}

/// The attributes of an item as `NAME TYPE VALUE`, as an earlier version wrote them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_golden_item_is_read_and_written() {
    let Some((_server, client)) = start().await else { return };
    let golden: std::collections::HashMap<String, AttributeValue> = include_str!("golden/dynamodb-fence")
        .lines()
        .map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [name, "S", value] => (name.to_owned(), S(value.into())),
            [name, "N", value] => (name.to_owned(), N(value.into())),
            [name, "B", value] => (name.to_owned(), B(Blob::new(value))),
            _ => panic!("{line}"),
        })
        .collect();
    client.put_item().table_name("orders").set_item(Some(golden.clone())).send().await.unwrap();
    let values = DynamoFenced::new(client.clone(), "orders", "id");
    let found = values.read("value").await.unwrap();
    assert_eq!(found, Some(GuardedValue { fence: fence(42), value: Some(b"the".to_vec()) }));
    stale(&values.put("value", fence(41), b"late").await, 41, 42);
    values.put("value", fence(42), b"the").await.unwrap();
    let get = client.get_item().table_name("orders").key("id", S("value".into())).consistent_read(true);
    assert_eq!(get.send().await.unwrap().item, Some(golden), "the stored format has changed");
}
