//! The laws, on real servers. Every client is another open store with its own connection. Laws share the servers under
//! different paths, as different programs would.

mod common;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::servers::{self, Cluster, Server, ZooKeeperOptions};
use lockkeeper_zookeeper::{Options, ZooKeeperStore};

/// A server that lives for as long as a law uses it.
fn share<T>(shared: &Mutex<Weak<T>>, start: impl FnOnce() -> Option<T>) -> Option<Arc<T>> {
    let mut shared = shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(running) = shared.upgrade() {
        return Some(running);
    }
    let started = Arc::new(start()?);
    *shared = Arc::downgrade(&started);
    Some(started)
}

/// Servers that allow long sessions, so that a busy machine does not end one.
fn patient() -> ZooKeeperOptions {
    ZooKeeperOptions { extra: vec!["maxSessionTimeout=60000".into()], ..ZooKeeperOptions::default() }
}

fn prefix() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("law{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Whether servers of this version keep writes that a majority has accepted: before 3.9.4 they may lose them, and the
/// store reports it.
fn keeps(addr: SocketAddr) -> bool {
    let told = common::four_letter(addr, "srvr");
    let version = told.lines().find_map(|line| line.strip_prefix("Zookeeper version: ")).expect("a version");
    let numbers: Vec<u32> = version.split(['.', '-', ',']).map_while(|part| part.parse().ok()).collect();
    numbers >= vec![3, 9, 4]
}

macro_rules! harness {
    ($name:ident: $server:ty, $start:expr, $address:expr, $keeps:expr) => {
        static KEEPS: OnceLock<bool> = OnceLock::new();

        struct $name {
            server: Arc<$server>,
            prefix: String,
        }

        #[async_trait]
        impl Harness for $name {
            // Grants of an earlier session do not count.
            const RESUMES: bool = false;

            async fn start() -> Option<Self> {
                static SHARED: Mutex<Weak<$server>> = Mutex::new(Weak::new());
                let server = tokio::task::spawn_blocking(|| share(&SHARED, $start)).await.unwrap()?;
                let keeps: fn(&$server) -> bool = $keeps;
                KEEPS.get_or_init(|| keeps(&server));
                Some($name { server, prefix: prefix() })
            }

            async fn client(&self) -> Arc<dyn Store> {
                let address: fn(&$server, &str) -> String = $address;
                // A long timeout for the slow disks of a busy machine; but the locks of a dead client must be free
                // before a law gives up. A law waits for less than a poll, so that a lost wake-up is noticed.
                let url = address(&self.server, &self.prefix) + "timeout=20s&session=20s&poll=60s&create=yes";
                Arc::new(ZooKeeperStore::open(Options::from_url(&url).unwrap()).await.unwrap())
            }

            fn clock(&self) -> Arc<dyn Clock> {
                Arc::new(SystemClock)
            }

            fn for_correctness() -> bool {
                *KEEPS.get().expect("it was started")
            }

            async fn pass(&self, time: Duration) {
                tokio::time::sleep(time).await;
            }
        }
    };
}

mod one_node {
    use super::*;
    fn address(server: &Server, prefix: &str) -> String {
        format!("zk://{}/{prefix}?", server.addr())
    }
    harness!(One: Server, || servers::zookeeper(patient()).ok(), address, |_| true);
    lockkeeper_testkit::conformance!(One);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(One);
    }
}

mod three_nodes {
    use super::*;
    fn keep(cluster: &Cluster) -> bool {
        keeps(cluster.nodes()[0].addr())
    }
    fn address(cluster: &Cluster, prefix: &str) -> String {
        format!("zk://{}/{prefix}?", cluster.hosts())
    }
    harness!(Three: Cluster, || servers::zookeeper_cluster(3, patient()).ok(), address, keep);
    lockkeeper_testkit::conformance!(Three);
}

#[cfg(feature = "tls")]
mod over_tls {
    use super::*;
    use lockkeeper_testkit::servers::{TlsFiles, zookeeper_tls_addr};
    struct Encrypted(Server, TlsFiles);
    fn start() -> Option<Encrypted> {
        let tls = TlsFiles::new();
        let options = ZooKeeperOptions { tls: Some(tls.clone()), ..patient() };
        Some(Encrypted(servers::zookeeper(options).ok()?, tls))
    }
    fn address(Encrypted(server, tls): &Encrypted, prefix: &str) -> String {
        format!("zks://{}/{prefix}?ca={}&", zookeeper_tls_addr(server), tls.ca_path().display())
    }
    harness!(Tls: Encrypted, start, address, |_| true);
    lockkeeper_testkit::conformance!(Tls);
}
