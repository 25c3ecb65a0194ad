//! The laws, on a real file, by the machine's own clock. Every client is another open store, as another process would
//! be: they share nothing but the file.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Expect, LockName, Store};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_sqlite::{Options, SqliteStore};
use lockkeeper_testkit::laws::Harness;
use rusqlite::Connection;

struct File(PathBuf);

#[async_trait]
impl Harness for File {
    async fn start() -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("lockkeeper-laws-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Some(File(dir))
    }

    async fn client(&self) -> Arc<dyn Store> {
        Arc::new(SqliteStore::open(Options::new(self.0.join("locks.db"))).unwrap())
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

    /// Counts the rows that a sweep leaves. One transaction in sixteen sweeps.
    async fn stored_buckets(&self) -> usize {
        let (store, key) = (self.client().await, LockName::new("sweep").unwrap());
        for n in 0..64_u32 {
            store.write(&key, &n.to_be_bytes(), Expect::Any, None).await.unwrap();
        }
        store.delete(&key, Expect::Any).await.unwrap();
        let db = Connection::open(self.0.join("locks.db")).unwrap();
        db.query_row("SELECT count(*) FROM limit_bucket", [], |row| row.get::<_, i64>(0)).unwrap() as usize
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

lockkeeper_testkit::conformance!(File);
mod recipes {
    use super::*;
    lockkeeper_testkit::recipes!(File);
}
