//! The laws, on five real servers. Every client is another open store with connections of its own; what they share is
//! the servers. Laws share them too, under different prefixes, as different programs would.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_redlock::{Options, RedlockStore};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::servers::{self, RedisOptions, Server};

struct Five {
    servers: Arc<Vec<Server>>,
    prefix: String,
}

/// The laws' servers: they live for as long as a law uses them.
fn share() -> Option<Arc<Vec<Server>>> {
    static SHARED: Mutex<Weak<Vec<Server>>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(running) = shared.upgrade() {
        return Some(running);
    }
    let started = (0..5).map(|_| servers::redis(RedisOptions::default()).ok()).collect::<Option<Vec<_>>>()?;
    let started = Arc::new(started);
    *shared = Arc::downgrade(&started);
    Some(started)
}

#[async_trait]
impl Harness for Five {
    async fn start() -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let servers = tokio::task::spawn_blocking(share).await.unwrap()?;
        Some(Five { servers, prefix: format!("law{}:", COUNT.fetch_add(1, Ordering::Relaxed)) })
    }

    async fn client(&self) -> Arc<dyn Store> {
        let hosts: Vec<String> = self.servers.iter().map(|server| server.addr().to_string()).collect();
        // The servers are as young as the test, the laws' leases are long, and the machine may be busy.
        let url = format!(
            "redlock://{}?prefix={}&max_ttl=15m&young_node=0s&node_timeout=800ms&timeout=5s",
            hosts.join(","),
            self.prefix
        );
        Arc::new(RedlockStore::open(Options::from_url(&url).unwrap()).await.unwrap())
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }

    fn for_correctness() -> bool {
        false
    }

    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

lockkeeper_testkit::conformance!(Five);
mod recipes {
    use super::*;
    lockkeeper_testkit::recipes!(Five);
}
