//! A moto server in place of DynamoDB, and helpers for its tables.
#![allow(dead_code, reason = "every test program uses a part of it")]

pub mod front;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use lockkeeper_core::{Result, Store};
use lockkeeper_dynamodb::{DynamoStore, Init, Options, init};
use lockkeeper_testkit::servers::{self, Server};

/// The server of this test program. All tests share it, because it takes seconds to start.
pub async fn moto() -> Option<Arc<Server>> {
    static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    let start = || {
        let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(running) = shared.upgrade() {
            return Some(running);
        }
        let started = Arc::new(servers::moto().ok()?);
        *shared = Arc::downgrade(&started);
        Some(started)
    };
    tokio::task::spawn_blocking(start).await.unwrap()
}

/// The URL of a table at a server. The timeout is long, because the server is slow and the machine may be busy.
pub fn url(at: SocketAddr, table: &str) -> String {
    format!("dynamodb://test:secret@eu-central-1/{table}?endpoint=http://{at}&timeout=10s&poll=100ms")
}

/// A table of its own, for one test.
pub async fn table(at: SocketAddr) -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("locks-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let made = init(Options::from_url(&url(at, &name)).unwrap()).await.unwrap();
    assert_eq!(made, Init::Made);
    name
}

pub async fn try_open(url: &str) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(DynamoStore::open(Options::from_url(url)?).await?))
}

pub async fn open(url: &str) -> Arc<dyn Store> {
    try_open(url).await.unwrap()
}

/// A client of the SDK, to read and write items directly.
pub async fn sdk(at: SocketAddr) -> aws_sdk_dynamodb::Client {
    use aws_sdk_dynamodb::config::{BehaviorVersion, Config, Credentials, Region};
    let config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .region(Region::new("eu-central-1"))
        .credentials_provider(Credentials::new("test", "secret", None, None, "a test"))
        .endpoint_url(format!("http://{at}"));
    aws_sdk_dynamodb::Client::from_conf(config.build())
}

/// A table of another program.
pub async fn foreign_table(client: &aws_sdk_dynamodb::Client, name: &str) {
    use aws_sdk_dynamodb::types::{
        AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType,
    };
    let key = KeySchemaElement::builder().attribute_name("id").key_type(KeyType::Hash).build().unwrap();
    let id =
        AttributeDefinition::builder().attribute_name("id").attribute_type(ScalarAttributeType::S).build();
    let make = client.create_table().table_name(name).key_schema(key).attribute_definitions(id.unwrap());
    make.billing_mode(BillingMode::PayPerRequest).send().await.unwrap();
}
