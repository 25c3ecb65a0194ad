//! The store, as the library uses it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Acquired, Ask, Attempt, Grant, Holder, LockName, Locks};
use lockkeeper_host::random_128;
use lockkeeper_sqlite::{Options, SqliteStore};

pub fn open(path: &Path) -> SqliteStore {
    SqliteStore::open(Options::new(path)).expect("a store")
}

pub fn holder() -> Arc<Holder> {
    Arc::new(Holder::new("bench", 1, None).expect("a holder"))
}

pub fn ask(name: &LockName, holder: &Arc<Holder>) -> Ask {
    Ask::new(Attempt::from_bytes(random_128()), name.clone(), Duration::from_secs(30), holder.clone())
}

pub async fn take(store: &SqliteStore, name: &LockName, holder: &Arc<Holder>) -> Grant {
    match store.acquire(&ask(name, holder)).await {
        Ok(Acquired::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// Takes a lock and gives it back.
pub async fn cycle(store: &SqliteStore, name: &LockName, holder: &Arc<Holder>) {
    let grant = take(store, name, holder).await;
    store.release(&grant.claim).await.expect("an answer");
}
