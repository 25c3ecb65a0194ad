//! Five servers, each behind a proxy of its own, and what is needed to ask them.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::{AcquireOutcome, Attempt, Grant, Holder, LockName, LockRequest, Locks, Result, Store};
use lockkeeper_host::random_128;
use lockkeeper_redlock::{Options, RedlockStore};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, RedisOptions, Server, redis_call};

pub const NODES: usize = 5;
pub const QUORUM: usize = 3;

pub struct Fleet {
    pub servers: Vec<Server>,
    pub proxies: Vec<Proxy>,
}

impl Fleet {
    pub fn start() -> Option<Fleet> {
        Self::with(|_| RedisOptions::default())
    }

    pub fn with(options: impl Fn(usize) -> RedisOptions) -> Option<Fleet> {
        let servers =
            (0..NODES).map(|node| servers::redis(options(node)).ok()).collect::<Option<Vec<_>>>()?;
        let proxies = servers.iter().map(|server| Proxy::start(server.addr(), Framing::Resp)).collect();
        Some(Fleet { servers, proxies })
    }

    pub fn url(&self, options: &str) -> String {
        let hosts: Vec<String> = self.proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
        format!("redlock://{}?{options}", hosts.join(","))
    }

    pub async fn open(&self, options: &str) -> RedlockStore {
        RedlockStore::open(Options::from_url(&self.url(options)).unwrap()).await.unwrap()
    }

    /// A client that no fault of the proxies touches.
    pub async fn past_the_proxies(&self, options: &str) -> Arc<dyn Store> {
        let hosts: Vec<String> = self.servers.iter().map(|server| server.addr().to_string()).collect();
        let url = format!("redlock://{}?{options}", hosts.join(","));
        Arc::new(RedlockStore::open(Options::from_url(&url).unwrap()).await.unwrap())
    }

    /// The nodes that have the key of a lock. All of them must run.
    pub fn keys(&self, name: &str) -> Vec<usize> {
        let has = |node: &usize| {
            let key = format!("lock:{name}");
            redis_call(self.servers[*node].addr(), &["EXISTS", &key]).unwrap() == "1"
        };
        (0..NODES).filter(has).collect()
    }

    /// Waits until no node has anything of a lock.
    pub async fn nothing_left(&self, name: &str, story: &str) {
        // Requests and their releases that were held up arrive one after the other, so both are looked at until both are gone.
        let beside = |server: &Server| {
            redis_call(server.addr(), &["KEYS", &format!("lockkeeper:*vote*{name}")]).unwrap()
        };
        eventually(&format!("{story}: nothing is left of {name}, nor beside it"), async || {
            self.keys(name).is_empty() && self.servers.iter().all(|server| beside(server).is_empty())
        })
        .await;
    }
}

pub async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(15);
    while !check().await {
        assert!(Instant::now() < until, "it did not happen: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub fn request(name: &str, ttl: Duration) -> LockRequest {
    let holder = Holder::new("host", 1, Some("a test".into())).unwrap();
    LockRequest::new(Attempt::from_bytes(random_128()), LockName::new(name).unwrap(), ttl, Arc::new(holder))
}

pub async fn take(store: &RedlockStore, request: &LockRequest) -> Grant {
    match store.acquire(request).await {
        Ok(AcquireOutcome::Granted(grant)) => grant,
        other => panic!("it was to be granted: {other:?}"),
    }
}

pub fn granted(answer: &Result<AcquireOutcome>) -> bool {
    matches!(answer, Ok(AcquireOutcome::Granted(_)))
}

/// Dice with a seed that is printed, so that a failure can be played again: `LOCKKEEPER_SEED=<it>`.
pub struct Dice(u64);

impl Dice {
    pub fn new() -> Dice {
        let given = std::env::var("LOCKKEEPER_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or_else(|| u64::from_be_bytes(random_128()[..8].try_into().unwrap()));
        println!("LOCKKEEPER_SEED={seed}");
        Dice(seed)
    }

    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}
