//! The store, as the library uses it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{AcquireOutcome, Attempt, Grant, Holder, LockName, LockRequest, Locks};
use lockkeeper_host::random_128;
use lockkeeper_sqlite::{Options, SqliteStore};

pub fn open(path: &Path) -> SqliteStore {
    SqliteStore::open(Options::new(path)).expect("a store")
}

pub fn holder() -> Arc<Holder> {
    Arc::new(Holder::new("bench", 1, None).expect("a holder"))
}

pub fn request(name: &LockName, holder: &Arc<Holder>) -> LockRequest {
    LockRequest::new(Attempt::from_bytes(random_128()), name.clone(), Duration::from_secs(30), holder.clone())
}

pub async fn take(store: &SqliteStore, name: &LockName, holder: &Arc<Holder>) -> Grant {
    match store.acquire(&request(name, holder)).await {
        Ok(AcquireOutcome::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// Acquires and releases a lock.
pub async fn cycle(store: &SqliteStore, name: &LockName, holder: &Arc<Holder>) {
    let grant = take(store, name, holder).await;
    store.release(&grant.key).await.expect("an answer");
}
