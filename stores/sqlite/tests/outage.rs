//! Another program keeps the file locked for longer than a ttl.

mod common;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Dir, open};
use lockkeeper_core::Store;
use lockkeeper_testkit::laws::unknown::{self, Outage};

/// Longer than the store waits for a program that does not write.
const LOCKED: Duration = Duration::from_secs(8);

/// A program that begins to write, and does not end.
struct Writer {
    path: PathBuf,
    /// How long it goes on when the law is ready for its end.
    stays: Duration,
    connection: Mutex<Option<rusqlite::Connection>>,
}

impl Outage for Writer {
    fn begin(&self) {
        let connection = rusqlite::Connection::open(&self.path).unwrap();
        connection.busy_timeout(Duration::from_secs(30)).unwrap();
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        *self.connection.lock().unwrap() = Some(connection);
    }

    fn end(&self) {
        std::thread::sleep(self.stays);
        self.connection.lock().unwrap().take();
    }
}

/// The driver gave up to release a queued request after its ttl, and its row blocked the queue for as long as the process lived.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_release_that_was_given_up_leaves_nothing() {
    let dir = Dir::new();
    let store: Arc<dyn Store> = Arc::new(open(&dir.db()));
    let other: Arc<dyn Store> = Arc::new(open(&dir.db()));
    let writer = Writer { path: dir.db(), stays: LOCKED, connection: Mutex::default() };
    unknown::a_release_that_was_given_up_leaves_nothing(&writer, &store, &other).await;
}

/// A wait that ends while the file is locked is told only when the store has given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_wait_that_ends_during_an_outage_leaves_nothing() {
    let dir = Dir::new();
    let store: Arc<dyn Store> = Arc::new(open(&dir.db()));
    let other: Arc<dyn Store> = Arc::new(open(&dir.db()));
    let writer = Writer { path: dir.db(), stays: Duration::ZERO, connection: Mutex::default() };
    unknown::a_wait_that_ends_during_an_outage_leaves_nothing(&writer, &store, &other).await;
}
