//! Against etcd's own lock, and against a bare pair of transactions.

use std::sync::Arc;

use lockkeeper_core::Store;
use lockkeeper_etcd::{EtcdStore, Options};
use lockkeeper_testkit::ratio::{Comparison, CycleCounter, acquire_and_release, measure};
use lockkeeper_testkit::servers::{self, EtcdOptions};
use prost::{Message, Oneof};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

#[derive(Clone, PartialEq, Message)]
struct LeaseGrant {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGranted {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Lock {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Locked {
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Unlock {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

#[derive(Clone, PartialEq, Message)]
struct Compare {
    /// 0: equal.
    #[prost(int32, tag = "1")]
    result: i32,
    /// 1: the revision of creation.
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    #[prost(int64, optional, tag = "5")]
    create_revision: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Put {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
    #[prost(int64, tag = "3")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Delete {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Request {
    #[prost(message, tag = "2")]
    Put(Put),
    #[prost(message, tag = "3")]
    Delete(Delete),
}

#[derive(Clone, PartialEq, Message)]
struct Op {
    #[prost(oneof = "Request", tags = "2, 3")]
    request: Option<Request>,
}

#[derive(Clone, PartialEq, Message)]
struct Txn {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<Op>,
}

#[derive(Clone, PartialEq, Message)]
struct TxnDone {
    #[prost(bool, tag = "2")]
    succeeded: bool,
}

async fn call<A, B>(channel: &Channel, path: &'static str, request: A) -> B
where
    A: Message + Default + 'static,
    B: Message + Default + 'static,
{
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.expect("a connection");
    let path = PathAndQuery::from_static(path);
    let codec = ProstCodec::<A, B>::default();
    grpc.unary(tonic::Request::new(request), path, codec).await.expect("an answer").into_inner()
}

async fn lease(channel: &Channel) -> i64 {
    let granted: LeaseGranted =
        call(channel, "/etcdserverpb.Lease/LeaseGrant", LeaseGrant { ttl: 600 }).await;
    granted.id
}

/// The lock recipe of `etcdctl lock`, with one lease for all locks.
async fn own_lock(channel: Channel, lease: i64, task: u64, run: CycleCounter) {
    let name = format!("own/task/{task}").into_bytes();
    while run.goes_on() {
        let locked: Locked = call(&channel, "/v3lockpb.Lock/Lock", Lock { name: name.clone(), lease }).await;
        let _: Nothing = call(&channel, "/v3lockpb.Lock/Unlock", Unlock { key: locked.key }).await;
        run.one_more();
    }
}

/// The least that a lock could be: create the key if it is not there, and delete it if it is ours.
async fn bare(channel: Channel, lease: i64, task: u64, run: CycleCounter) {
    let key = format!("bare/task/{task}").into_bytes();
    let is = |created| Compare { result: 0, target: 1, key: key.clone(), create_revision: Some(created) };
    while run.goes_on() {
        let put = Put { key: key.clone(), value: b"bench".to_vec(), lease };
        let take = Txn { compare: vec![is(0)], success: vec![Op { request: Some(Request::Put(put)) }] };
        let done: TxnDone = call(&channel, "/etcdserverpb.KV/Txn", take).await;
        assert!(done.succeeded);
        let delete = Op { request: Some(Request::Delete(Delete { key: key.clone() })) };
        let give_back = Txn { compare: Vec::new(), success: vec![delete] };
        let done: TxnDone = call(&channel, "/etcdserverpb.KV/Txn", give_back).await;
        assert!(done.succeeded);
        run.one_more();
    }
}

pub async fn run(rounds: usize) {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let told = servers::etcd_get(server.addr(), "/version").expect("the server answers");
    let version = told.rsplit('"').nth(5).unwrap_or("?").to_owned();
    println!("etcd {version}, {rounds} rounds, medians");
    let endpoint = Endpoint::from_shared(format!("http://{}", server.addr())).expect("an address");
    let channel = endpoint.tcp_nodelay(true).connect().await.expect("a connection");
    let lease = lease(&channel).await;
    let options = Options::from_url(&format!("etcd://{}", server.addr())).expect("an address");
    let store: Arc<dyn Store> = Arc::new(EtcdStore::open(options).await.expect("a store"));
    let mut many = Comparison::new("  64 tasks, etcd's own Lock and Unlock");
    let mut one = Comparison::new("  1 task, a bare create and delete");
    for _ in 0..rounds {
        let peer = measure(64, |task, run| own_lock(channel.clone(), lease, task, run)).await;
        many.add(peer, measure(64, |task, run| acquire_and_release(store.clone(), task, run)).await);
        let peer = measure(1, |task, run| bare(channel.clone(), lease, task, run)).await;
        one.add(peer, measure(1, |task, run| acquire_and_release(store.clone(), task, run)).await);
    }
    many.print("goal: at least 4");
    one.print("goal: at least 0.83, which is 1.2 times the latency");
}
