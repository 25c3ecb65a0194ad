//! Redis: the laws on one server and on a cluster, and what is special about keys.
#![cfg(feature = "redis")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};
use lockkeeper_fenced::redis::redis::aio::MultiplexedConnection;
use lockkeeper_fenced::redis::redis::cluster::ClusterClient;
use lockkeeper_fenced::redis::redis::cluster_async::ClusterConnection;
use lockkeeper_fenced::redis::{RedisFenced, mark_key, redis};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use lockkeeper_testkit::proxy::{At, Fault, Framing, Proxy, every_point};
use lockkeeper_testkit::servers::{self, RedisCluster, RedisOptions, Server, redis_call};
use redis::aio::ConnectionLike;

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

/// One of the laws' servers: it lives for as long as a law uses it.
fn share<T>(shared: &Mutex<Weak<T>>, start: impl FnOnce() -> Option<T>) -> Option<Arc<T>> {
    let mut shared = shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(running) = shared.upgrade() {
        return Some(running);
    }
    let started = Arc::new(start()?);
    *shared = Arc::downgrade(&started);
    Some(started)
}

/// A part of the server of its own: the keys of a law begin with its number.
fn prefix() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed).to_string()
}

async fn single(addr: &str) -> MultiplexedConnection {
    redis::Client::open(format!("redis://{addr}")).unwrap().get_multiplexed_async_connection().await.unwrap()
}

async fn cluster(addrs: &str) -> ClusterConnection {
    let nodes = addrs.split(',').map(|addr| format!("redis://{addr}"));
    ClusterClient::new(nodes).unwrap().get_async_connection().await.unwrap()
}

/// The laws' names begin with a number, so that laws do not meet.
struct Prefixed<T>(T, String);

impl<T> Prefixed<T> {
    fn name(&self, resource: &str) -> String {
        format!("{}{resource}", self.1)
    }
}

#[async_trait]
impl<T: Fenced> Fenced for Prefixed<T> {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.0.put(&self.name(resource), fence, value).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.0.delete(&self.name(resource), fence).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        self.0.read(&self.name(resource)).await
    }
}

/// What people do without a fence.
struct Plain<C>(C);

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync> Fenced for Plain<C> {
    async fn put(&self, resource: &str, _: Fence, value: &[u8]) -> Result<()> {
        redis::cmd("SET").arg(resource).arg(value).exec_async(&mut self.0.clone()).await.unwrap();
        Ok(())
    }

    async fn delete(&self, resource: &str, _: Fence) -> Result<()> {
        redis::cmd("DEL").arg(resource).exec_async(&mut self.0.clone()).await.unwrap();
        Ok(())
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let value: Option<Vec<u8>> =
            redis::cmd("GET").arg(resource).query_async(&mut self.0.clone()).await.unwrap();
        Ok(value.map(|value| GuardedValue { fence: Fence::MIN, value: Some(value) }))
    }
}

macro_rules! harness {
    ($name:ident: $server:ty, $start:expr, $addr:expr, $connect:ident) => {
        struct $name(Arc<$server>, String);

        #[async_trait]
        impl FencedHarness for $name {
            async fn start() -> Option<Self> {
                static SHARED: Mutex<Weak<$server>> = Mutex::new(Weak::new());
                let server = tokio::task::spawn_blocking(|| share(&SHARED, $start)).await.unwrap()?;
                Some($name(server, prefix()))
            }

            fn address(&self) -> String {
                let addr: fn(&$server) -> String = $addr;
                format!("{} {}", addr(&self.0), self.1)
            }

            async fn client(address: &str) -> Arc<dyn Fenced> {
                let (addr, prefix) = address.split_once(' ').unwrap();
                Arc::new(Prefixed(RedisFenced::new($connect(addr).await), prefix.into()))
            }

            async fn twin(address: &str) -> Arc<dyn Fenced> {
                let (addr, prefix) = address.split_once(' ').unwrap();
                Arc::new(Prefixed(Plain($connect(addr).await), prefix.into()))
            }
        }
    };
}

harness!(One: Server, || servers::redis(RedisOptions::default()).ok(), |server| server.addr().to_string(), single);
harness!(Several: RedisCluster, || servers::redis_cluster(3).ok(), |cluster| {
    cluster.addrs().iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}, cluster);

mod one {
    use super::*;
    lockkeeper_testkit::fenced_laws!(One);
}

mod several {
    use super::*;
    lockkeeper_testkit::fenced_laws!(Several);
}

fn stale<T>(answer: Result<T>) -> bool {
    matches!(answer, Err(Error::Stale { .. }))
}

#[tokio::test]
async fn hashes_values_with_a_ttl_and_strange_keys() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let addr = server.addr();
    let fenced = RedisFenced::new(single(&addr.to_string()).await);
    fenced.hset("h", fence(5), &[("a", "1"), ("b", "2")]).await.unwrap();
    fenced.hset("h", fence(7), &[("b", "3")]).await.unwrap();
    assert!(stale(fenced.hset("h", fence(6), &[("a", "late")]).await));
    assert!(stale(fenced.del("h", fence(6)).await) && stale(fenced.set("h", fence(6), "late").await));
    assert_eq!(redis_call(addr, &["HGETALL", "h"]).unwrap(), "a\n1\nb\n3");
    assert_eq!(fenced.mark("h").await.unwrap(), Some(fence(7)));
    // More fields than one call takes.
    let many: Vec<(String, String)> = (0..20_000).map(|n| (format!("f{n}"), n.to_string())).collect();
    fenced.hset("many", fence(1), &many).await.unwrap();
    assert_eq!(redis_call(addr, &["HLEN", "many"]).unwrap(), "20000");
    // A value goes, its mark stays.
    fenced.set_for("t", fence(5), "short", Duration::from_millis(1)).await.unwrap();
    while redis_call(addr, &["EXISTS", "t"]).unwrap() != "0" {
        tokio::task::yield_now().await;
    }
    assert!(stale(fenced.set("t", fence(4), "late").await));
    assert_eq!(redis_call(addr, &["TTL", "lockkeeper-fence:{t}"]).unwrap(), "-1");
    // Any bytes are a key.
    fenced.set(b"\xff\0}", fence(5), b"\0").await.unwrap();
    assert!(stale(fenced.set(b"\xff\0}", fence(4), b"late").await));
    assert!(matches!(fenced.set_for("t", fence(9), "x", Duration::ZERO).await, Err(Error::Invalid(_))));
    assert!(matches!(fenced.hset::<&str, &str>("t", fence(9), &[]).await, Err(Error::Invalid(_))));
    // Another kind of value, and a mark that is none.
    assert!(matches!(fenced.hset("t2", fence(1), &[("a", "1")]).await, Ok(())));
    redis_call(addr, &["SET", "s", "text"]).unwrap();
    let told = fenced.hset("s", fence(1), &[("a", "1")]).await;
    assert!(matches!(told, Err(Error::Invalid(_))), "{told:?}");
    redis_call(addr, &["SET", "lockkeeper-fence:{d}", "many"]).unwrap();
    let told = fenced.set("d", fence(9), "x").await;
    assert!(matches!(&told, Err(Error::Invalid(text)) if text.contains("damaged")), "{told:?}");
    assert_eq!(redis_call(addr, &["EXISTS", "d"]).unwrap(), "0");
    // The rights of the page are enough, and those that are missing are told.
    let rights =
        "ACL SETUSER w on >x ~k ~lockkeeper-fence:* -@all +evalsha +eval +get +set +hset +del +client";
    redis_call(addr, &rights.split(' ').collect::<Vec<_>>()).unwrap();
    let w = RedisFenced::new(single(&format!("w:x@{addr}")).await);
    w.set("k", fence(1), "x").await.unwrap();
    w.del("k", fence(2)).await.unwrap();
    w.hset("k", fence(3), &[("a", "1")]).await.unwrap();
    let told = w.set("other", fence(1), "x").await;
    assert!(matches!(told, Err(Error::Denied(_))), "{told:?}");
    // A server that forgot the script is told it again.
    redis_call(addr, &["SCRIPT", "FLUSH"]).unwrap();
    fenced.set("after", fence(1), "flush").await.unwrap();
}

#[tokio::test]
async fn in_a_cluster_the_mark_moves_with_its_key() {
    let Ok(servers) = servers::redis_cluster(3) else { return };
    let addrs: Vec<String> = servers.addrs().iter().map(ToString::to_string).collect();
    let fenced = RedisFenced::new(cluster(&addrs.join(",")).await);
    for key in ["orders/42", "{x}y", "a}b", "{}z", "}{"] {
        let mark = String::from_utf8(mark_key(key.as_bytes())).unwrap();
        let slot = servers.slot_of(key);
        assert_eq!(servers.slot_of(&mark), slot, "{key}: the server counts otherwise");
        fenced.set(key, fence(7), "seven").await.unwrap();
        servers.migrate_slot(slot, (servers.node_of_slot(slot) + 1) % 3);
        assert!(stale(fenced.set(key, fence(6), "late").await), "{key}");
        fenced.set(key, fence(8), "eight").await.unwrap();
    }
    // A node of a cluster that is taken for a single server says so.
    let node = RedisFenced::new(single(&addrs[0]).await);
    let foreign = ["a", "b", "c", "d", "e"]
        .into_iter()
        .find(|key| servers.node_of_slot(servers.slot_of(key)) != 0)
        .unwrap();
    let told = node.set(foreign, fence(1), "x").await;
    assert!(matches!(told, Err(Error::Unavailable(_))), "{told:?}");
}

/// A client behind a proxy writes with 5, and the reply may get lost. Sent again, the write is done once; after a newer write it is refused.
async fn break_everywhere(fault: fn(At) -> Fault) {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let other = RedisFenced::new(single(&server.addr().to_string()).await);
    let points = every_point(50, async |n| {
        let proxy = Proxy::start(server.addr(), Framing::Resp);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        let (name, url) = (format!("r{n}"), format!("redis://{}", proxy.addr()));
        let mut tries = 0;
        loop {
            tries += 1;
            let client = redis::Client::open(url.as_str()).unwrap();
            let Ok(connection) = client.get_multiplexed_async_connection().await else { continue };
            match RedisFenced::new(connection).set(&name, fence(5), "five").await {
                Ok(()) => break,
                Err(Error::Unknown(_) | Error::Unavailable(_)) if tries < 5 => {}
                Err(e) => panic!("{e}"),
            }
        }
        let seen = GuardedValue { fence: fence(5), value: Some(b"five".to_vec()) };
        assert_eq!(other.read(&name).await.unwrap(), Some(seen));
        other.set(&name, fence(6), "six").await.unwrap();
        let client = redis::Client::open(url.as_str()).unwrap();
        if let Ok(connection) = client.get_multiplexed_async_connection().await {
            let late = RedisFenced::new(connection).set(&name, fence(5), "five").await;
            assert!(
                matches!(late, Err(Error::Stale { .. } | Error::Unknown(_) | Error::Unavailable(_))),
                "{late:?}"
            );
        }
        assert_eq!(other.read(&name).await.unwrap().unwrap().value, Some(b"six".to_vec()));
        injected.fired()
    })
    .await;
    assert!(points >= 2, "only {points} points");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_whose_answer_is_lost_is_done_once_and_can_be_repeated() {
    break_everywhere(At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_never_arrives_is_told_and_can_be_repeated() {
    break_everywhere(At::reset).await;
}

/// The stored format: the mark that this version writes, and that every later version must read.
#[tokio::test]
async fn the_golden_mark_is_read_and_written() {
    let golden = include_str!("golden/redis-mark");
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let addr = server.addr();
    let fenced = RedisFenced::new(single(&addr.to_string()).await);
    fenced.set("written", fence(42), "the value").await.unwrap();
    assert_eq!(redis_call(addr, &["GET", "lockkeeper-fence:{written}"]).unwrap(), golden);
    redis_call(addr, &["SET", "lockkeeper-fence:{read}", golden]).unwrap();
    redis_call(addr, &["SET", "read", "the value"]).unwrap();
    let found = fenced.read("read").await.unwrap();
    assert_eq!(found, Some(GuardedValue { fence: fence(42), value: Some(b"the value".to_vec()) }));
    assert!(matches!(fenced.set("read", fence(41), "late").await, Err(Error::Stale { .. })));
}
