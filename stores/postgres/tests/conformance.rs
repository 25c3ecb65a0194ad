//! The laws, on real servers. Every client is another open store with connections of its own; what they share is the
//! database. Laws share a server too, in different schemas, as different programs would.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_postgres::{Options, PostgresStore};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

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

fn schema() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("law{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

macro_rules! harness {
    ($name:ident: $server:ty, $start:expr, $addr:expr) => {
        struct $name {
            server: Arc<$server>,
            schema: String,
        }

        #[async_trait]
        impl Harness for $name {
            async fn start() -> Option<Self> {
                static SHARED: Mutex<Weak<$server>> = Mutex::new(Weak::new());
                let server = tokio::task::spawn_blocking(|| share(&SHARED, $start)).await.unwrap()?;
                Some($name { server, schema: schema() })
            }

            async fn client(&self) -> Arc<dyn Store> {
                let addr: fn(&$server) -> String = $addr;
                // Slow disks of a busy machine are not what the laws are about.
                let (addr, schema) = (addr(&self.server), &self.schema);
                let url = format!("postgres://postgres@{addr}/postgres?schema={schema}&timeout=20s");
                Arc::new(PostgresStore::open(Options::from_url(&url).unwrap()).await.unwrap())
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

mod direct {
    use super::*;
    harness!(Direct: Server, || servers::postgres(PostgresOptions::default()).ok(), |server| server.addr().to_string());
    lockkeeper_testkit::conformance!(Direct);
    mod recipes {
        use super::*;
        lockkeeper_testkit::recipes!(Direct);
    }
}

mod pooled {
    use super::*;

    fn start() -> Option<(Server, Server)> {
        let server = servers::postgres(PostgresOptions::default()).ok()?;
        let pooler = servers::pgbouncer(server.addr()).ok()?;
        Some((pooler, server))
    }

    harness!(Pooled: (Server, Server), start, |pair| pair.0.addr().to_string());
    lockkeeper_testkit::conformance!(Pooled);
}
