//! The laws, on moto in place of DynamoDB. Every client is an open store with connections of its own; each law has its own table.

mod common;

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lockkeeper_core::{Page, Store};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::Harness;
use lockkeeper_testkit::servers::Server;

struct Table {
    server: Arc<Server>,
    name: String,
    clients: Mutex<Vec<Weak<dyn Store>>>,
}

#[async_trait]
impl Harness for Table {
    async fn start() -> Option<Self> {
        let server = common::moto().await?;
        let name = common::table(server.addr()).await;
        Some(Table { server, name, clients: Mutex::default() })
    }

    async fn client(&self) -> Arc<dyn Store> {
        let client = common::open(&common::url(self.server.addr(), &self.name)).await;
        self.clients.lock().unwrap().push(Arc::downgrade(&client));
        client
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }

    fn for_correctness() -> bool {
        true
    }

    /// A lease ends for a client that has observed it before the time passes, so every client observes all locks first.
    async fn pass(&self, time: Duration) {
        let clients: Vec<_> = self.clients.lock().unwrap().iter().filter_map(Weak::upgrade).collect();
        join_all(clients.iter().map(|client| client.list("", &Page::FIRST))).await;
        tokio::time::sleep(time).await;
    }
}

lockkeeper_testkit::conformance!(Table);

mod recipes {
    use super::Table;

    lockkeeper_testkit::recipes!(Table);
}
