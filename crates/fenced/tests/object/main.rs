//! Object stores: the laws in memory and on a server that speaks S3, and what is special about objects.
#![cfg(feature = "object-store")]

mod connector;
mod laws;
mod local;
mod objects;
mod s3;
mod shaky;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, Weak};

use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::object::ObjectFenced;
use lockkeeper_fenced::object::object_store::aws::AmazonS3Builder;
use lockkeeper_fenced::object::object_store::path::Path;
use lockkeeper_fenced::object::object_store::{ObjectStore, ObjectStoreExt};
use lockkeeper_testkit::servers::{self, Server};

const BUCKET: &str = "orders";

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

fn stale<T: std::fmt::Debug>(answer: &Result<T>, presented: u64, seen: u64) {
    match answer {
        Err(Error::Stale { presented: p, seen: s }) => assert_eq!((p.get(), s.get()), (presented, seen)),
        other => panic!("it was to be stale: {other:?}"),
    }
}

/// A server with a bucket. It lives for as long as a test uses it.
async fn server() -> Option<Arc<Server>> {
    static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    let get = || {
        let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(running) = shared.upgrade() {
            return Some(running);
        }
        let started = Arc::new(servers::moto().ok()?);
        make_bucket(started.addr());
        *shared = Arc::downgrade(&started);
        Some(started)
    };
    tokio::task::spawn_blocking(get).await.unwrap()
}

fn make_bucket(addr: SocketAddr) {
    let mut stream = TcpStream::connect(addr).unwrap();
    write!(stream, "PUT /{BUCKET} HTTP/1.0\r\nHost: {addr}\r\nContent-Length: 0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains(" 200 "), "{answer}");
}

/// A client of its own, as another process would have.
fn s3(addr: &str) -> Arc<dyn ObjectStore> {
    bucket(addr, BUCKET)
}

fn bucket(addr: &str, bucket: &str) -> Arc<dyn ObjectStore> {
    let store = AmazonS3Builder::new()
        .with_http_connector(connector::PlainHttp)
        .with_endpoint(format!("http://{addr}"))
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_bucket_name(bucket)
        .with_access_key_id("test")
        .with_secret_access_key("secret");
    Arc::new(store.build().unwrap())
}

async fn open(store: &Arc<dyn ObjectStore>, prefix: &str) -> ObjectFenced {
    ObjectFenced::open(store.clone(), prefix).await.unwrap()
}

/// All of an object, as it is.
async fn bytes(store: &Arc<dyn ObjectStore>, path: &str) -> Vec<u8> {
    store.get(&Path::from(path)).await.unwrap().bytes().await.unwrap().to_vec()
}

async fn plain(store: &Arc<dyn ObjectStore>, path: &str, bytes: &'static [u8]) {
    store.put(&Path::from(path), bytes.into()).await.unwrap();
}
