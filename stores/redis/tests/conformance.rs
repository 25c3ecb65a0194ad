//! The laws, on real servers. Every client is another open store with connections of its own; what they share is the
//! server. Laws share a server too, under different prefixes, as different programs would.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_redis::{Options, RedisStore};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::servers::{self, AppendOnly, RedisCluster, RedisOptions, RedisPair, Server};

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

fn prefix() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("law{}:", COUNT.fetch_add(1, Ordering::Relaxed))
}

async fn open(url: &str) -> Arc<dyn Store> {
    Arc::new(RedisStore::open(Options::from_url(url).unwrap()).await.unwrap())
}

macro_rules! harness {
    ($name:ident: $server:ty, $correct:literal, $start:expr, $url:expr) => {
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
                let url: fn(&$server) -> String = $url;
                open(&format!("{}?prefix={}", url(&self.server), self.prefix)).await
            }

            fn clock(&self) -> Arc<dyn Clock> {
                Arc::new(SystemClock)
            }

            fn for_correctness() -> bool {
                $correct
            }

            async fn pass(&self, time: Duration) {
                tokio::time::sleep(time).await;
            }
        }
    };
}

mod one_server {
    use super::*;
    harness!(One: Server, false, || servers::redis(RedisOptions::default()).ok(), |server| {
        format!("redis://{}", server.addr())
    });
    lockkeeper_testkit::conformance!(One);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(One);
    }
}

mod one_server_that_syncs_always {
    use super::*;
    harness!(
        Synced: Server,
        true,
        || {
            let append_only = AppendOnly::Always;
            servers::redis(RedisOptions { append_only, unix_socket: true, ..RedisOptions::default() }).ok()
        },
        |server| format!("redis+unix://{}", servers::redis_socket(server).display())
    );
    lockkeeper_testkit::conformance!(Synced);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(Synced);
    }
}

mod a_primary_and_its_replica {
    use super::*;
    harness!(Pair: RedisPair, false, || servers::redis_pair(RedisOptions::default()).ok(), |pair| {
        format!("redis://{}", pair.primary().addr())
    });
    lockkeeper_testkit::conformance!(Pair);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(Pair);
    }
}

mod a_cluster_of_three {
    use super::*;
    harness!(Three: RedisCluster, false, || servers::redis_cluster(3).ok(), |cluster| {
        // One of them is enough to find the others.
        format!("redis+cluster://{}", cluster.addrs()[0])
    });
    lockkeeper_testkit::conformance!(Three);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(Three);
    }
}
