//! What the tests of job tables share: a server, and a database of its own for each test.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use lockkeeper::jobs::{ExistingRows, JobTable, Jobs, install};
use lockkeeper::postgres::tokio_postgres::Client;
use lockkeeper::postgres::{Options, connect_to};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// A lease that ends within a test.
pub const SHORT: Duration = Duration::from_millis(500);
/// A lease that does not end within a test, however slow the machine is.
pub const LONG: Duration = Duration::from_secs(600);

/// A database of its own on the server that all tests share.
pub struct Database {
    pub server: Arc<Server>,
    pub name: String,
}

impl Database {
    /// `None` if the tests are to run without PostgreSQL, which has been said loudly then.
    pub async fn start() -> Option<Database> {
        static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let shared = tokio::task::spawn_blocking(|| {
            let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if let Some(running) = shared.upgrade() {
                return Some(running);
            }
            let server = Arc::new(servers::postgres(PostgresOptions::default()).ok()?);
            *shared = Arc::downgrade(&server);
            Some(server)
        });
        let server = shared.await.unwrap()?;
        let name = format!("jobs{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let root = format!("postgres://postgres@{}/postgres", server.addr());
        let client = connect(&root).await;
        client.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        Some(Database { server, name })
    }

    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    pub fn url_of(&self, role: &str) -> String {
        format!("postgres://{role}@{}/{}", self.server.addr(), self.name)
    }

    pub async fn client(&self) -> Client {
        connect(&self.url()).await
    }

    pub async fn sql(&self, text: &str) {
        self.client().await.batch_execute(text).await.unwrap_or_else(|e| panic!("{text}: {e:?}"));
    }

    /// The first column of the first row.
    pub async fn number(&self, sql: &str) -> i64 {
        self.client().await.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
    }

    /// Makes the job table `work` with rows of these numbers, and opens it with this lease.
    pub async fn jobs(&self, rows: usize, lease: Duration) -> Jobs {
        self.sql("CREATE TABLE work (id int PRIMARY KEY, note text)").await;
        self.install("work").await;
        self.sql(&format!("INSERT INTO work (id) SELECT generate_series(1, {rows})")).await;
        self.open("work", lease).await
    }

    pub async fn install(&self, table: &str) {
        let mut client = self.client().await;
        let table = JobTable::find(&mut client, table).await.unwrap();
        assert!(install(&mut client, &table, ExistingRows::Open).await.unwrap());
    }

    pub async fn open(&self, table: &str, lease: Duration) -> Jobs {
        open_at(&self.url(), table, lease).await
    }
}

/// Short pauses after failures, and three attempts.
pub async fn open_at(url: &str, table: &str, lease: Duration) -> Jobs {
    let jobs = Jobs::open(url, table).await.unwrap();
    let ms = Duration::from_millis;
    jobs.rules(lease, 3, Duration::ZERO, Duration::ZERO).unwrap().poll(ms(20))
}

pub async fn connect(url: &str) -> Client {
    connect_to(&Options::from_url(url).unwrap()).await.unwrap()
}
