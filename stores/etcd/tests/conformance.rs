//! The laws on real servers. Every client is an open store with its own connection. The laws share the servers under
//! different prefixes, as different programs would.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_etcd::{EtcdStore, Options};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::servers::{self, Cluster, EtcdOptions, Server};

/// A server that all laws share, while any law uses it.
fn share<T>(shared: &Mutex<Weak<T>>, start: impl FnOnce() -> Option<T>) -> Option<Arc<T>> {
    let mut shared = shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(running) = shared.upgrade() {
        return Some(running);
    }
    let started = Arc::new(start()?);
    *shared = Arc::downgrade(&started);
    Some(started)
}

fn prefix() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("law{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

macro_rules! harness {
    ($name:ident: $server:ty, $start:expr, $hosts:expr) => {
        struct $name {
            server: Arc<$server>,
            prefix: String,
        }

        #[async_trait]
        impl Harness for $name {
            async fn start() -> Option<Self> {
                static SHARED: Mutex<Weak<$server>> = Mutex::new(Weak::new());
                let server = tokio::task::spawn_blocking(|| share(&SHARED, $start)).await.unwrap()?;
                Some($name { server, prefix: prefix() })
            }

            async fn client(&self) -> Arc<dyn Store> {
                let hosts: fn(&$server) -> String = $hosts;
                // With a long timeout, because slow disks of a busy machine are not the subject of the laws. A lost wake-up is: so the
                // next poll is later than a law waits.
                let url = format!("etcd://{}/{}?timeout=20s&poll=60s", hosts(&self.server), self.prefix);
                Arc::new(EtcdStore::open(Options::from_url(&url).unwrap()).await.unwrap())
            }

            fn clock(&self) -> Arc<dyn Clock> {
                Arc::new(SystemClock)
            }

            fn for_correctness() -> bool {
                true
            }

            async fn pass(&self, time: Duration) {
                tokio::time::sleep(time).await;
            }
        }
    };
}

mod one_node {
    use super::*;
    harness!(One: Server, || servers::etcd(EtcdOptions::default()).ok(), |server| server.addr().to_string());
    lockkeeper_testkit::conformance!(One);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(One);
    }
}

mod three_nodes {
    use super::*;
    harness!(Three: Cluster, || servers::etcd_cluster(3, EtcdOptions::default()).ok(), |cluster| cluster.hosts());
    lockkeeper_testkit::conformance!(Three);
}
