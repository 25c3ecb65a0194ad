//! The laws, on real servers. Every client is another open store with a connection of its own; what they share are the
//! servers. Laws share the servers too, under different prefixes, as different programs would.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::servers::{self, Cluster, Server, ZooKeeperOptions};
use lockkeeper_zookeeper::{Options, ZooKeeperStore};

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

/// Servers that let sessions last for long: a busy machine is not what the laws are about.
fn patient() -> ZooKeeperOptions {
    ZooKeeperOptions { extra: vec!["maxSessionTimeout=60000".into()], ..ZooKeeperOptions::default() }
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
            // Nothing of an old session counts.
            const RESUMES: bool = false;

            async fn start() -> Option<Self> {
                static SHARED: Mutex<Weak<$server>> = Mutex::new(Weak::new());
                let server = tokio::task::spawn_blocking(|| share(&SHARED, $start)).await.unwrap()?;
                Some($name { server, prefix: prefix() })
            }

            async fn client(&self) -> Arc<dyn Store> {
                let hosts: fn(&$server) -> String = $hosts;
                // Slow disks of a busy machine are not what the laws are about.
                let url = format!(
                    "zk://{}/{}?timeout=20s&session=60s&create=yes",
                    hosts(&self.server),
                    self.prefix
                );
                Arc::new(ZooKeeperStore::open(Options::from_url(&url).unwrap()).await.unwrap())
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
    harness!(One: Server, || servers::zookeeper(patient()).ok(), |server| server.addr().to_string());
    lockkeeper_testkit::conformance!(One);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(One);
    }
}

mod three_nodes {
    use super::*;
    harness!(Three: Cluster, || servers::zookeeper_cluster(3, patient()).ok(), |cluster| cluster.hosts());
    lockkeeper_testkit::conformance!(Three);
}
