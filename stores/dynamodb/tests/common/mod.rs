//! A real server that takes DynamoDB's place, and what is needed to ask it.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use lockkeeper_core::{Result, Store};
use lockkeeper_dynamodb::{DynamoStore, Init, Options, init};
use lockkeeper_testkit::servers::{self, Server};

/// The server of this test program: it lives for as long as a test uses it, because it takes seconds to start.
pub async fn moto() -> Option<Arc<Server>> {
    static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    let start = || {
        let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(running) = shared.upgrade() {
            return Some(running);
        }
        let started = Arc::new(servers::moto().ok()?);
        *shared = Arc::downgrade(&started);
        Some(started)
    };
    tokio::task::spawn_blocking(start).await.unwrap()
}

/// The address of a table at a server. The machine may be busy, and the server is slow: its answers may take a while.
pub fn url(at: SocketAddr, table: &str) -> String {
    format!("dynamodb://test:secret@eu-central-1/{table}?endpoint=http://{at}&timeout=10s&poll=100ms")
}

/// A table of its own, for one test.
pub async fn table(at: SocketAddr) -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("locks-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let made = init(Options::from_url(&url(at, &name)).unwrap()).await.unwrap();
    assert_eq!(made, Init::Made);
    name
}

pub async fn try_open(url: &str) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(DynamoStore::open(Options::from_url(url)?).await?))
}

pub async fn open(url: &str) -> Arc<dyn Store> {
    try_open(url).await.unwrap()
}
