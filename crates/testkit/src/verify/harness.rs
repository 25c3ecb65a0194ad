//! The laws on a store of the user: the clients are few and shared, and every law has names of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::Store;
use lockkeeper_host::{Clock, SystemClock};

use super::private_store::{PrivateStore, StoreLog};
use crate::laws::Harness;

/// The names of one law in a store that is open already.
pub(super) struct OpenedStore {
    clients: Arc<[Arc<dyn Store>]>,
    prefix: Arc<str>,
    log: Arc<StoreLog>,
    next: AtomicUsize,
}

impl OpenedStore {
    /// The names below `prefix`, for a law that uses these clients in turn.
    pub fn new(clients: Arc<[Arc<dyn Store>]>, prefix: Arc<str>, log: Arc<StoreLog>) -> Self {
        OpenedStore { clients, prefix, log, next: AtomicUsize::new(0) }
    }
}

#[async_trait]
impl Harness for OpenedStore {
    /// Only a verification makes one.
    async fn start() -> Option<Self> {
        None
    }

    async fn client(&self) -> Arc<dyn Store> {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.clients.len();
        Arc::new(PrivateStore::new(self.clients[next].clone(), self.prefix.clone(), self.log.clone()))
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }

    /// No verification runs the law that asks.
    fn for_correctness() -> bool {
        false
    }

    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}
