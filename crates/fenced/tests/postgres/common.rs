//! What the tests of the PostgreSQL adapter share: a server, roles and tables.

use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use async_trait::async_trait;
use lockkeeper_core::{Fence, Result};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};
use tokio_postgres::{Client, NoTls};

pub fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

/// A schema of its own on the server that all tests share.
pub struct Place {
    pub server: Arc<Server>,
    pub schema: String,
}

impl Place {
    pub async fn start() -> Option<Place> {
        static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let shared = tokio::task::spawn_blocking(|| {
            let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if let Some(running) = shared.upgrade() {
                return Some(running);
            }
            // The laws have many clients, and several laws run at once.
            let settings = vec![("max_connections".to_owned(), "300".to_owned())];
            let server =
                Arc::new(servers::postgres(PostgresOptions { settings, ..Default::default() }).ok()?);
            *shared = Arc::downgrade(&server);
            Some(server)
        });
        let server = shared.await.unwrap()?;
        let schema = format!("law{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let place = Place { server, schema };
        place.sql(&format!("CREATE SCHEMA {}", place.schema)).await;
        Some(place)
    }

    /// For another process: `HOST PORT SCHEMA`.
    pub fn address(&self) -> String {
        format!("{} {} {}", self.server.addr().ip(), self.server.addr().port(), self.schema)
    }

    pub async fn client(&self) -> Client {
        connect(&self.address()).await
    }

    pub async fn sql(&self, text: &str) {
        self.client().await.batch_execute(text).await.unwrap_or_else(|e| panic!("{text}: {e:?}"));
    }

    /// What a person at a terminal does, in this schema. The first error ends it.
    pub fn psql(&self, text: &str) -> Output {
        self.psql_with("-qAt", text)
    }

    pub fn psql_with(&self, flags: &str, text: &str) -> Output {
        let addr = self.server.addr();
        Command::new("psql")
            .args(["-h", &addr.ip().to_string(), "-p", &addr.port().to_string()])
            .args([
                "-U",
                "postgres",
                "-d",
                "postgres",
                "-X",
                flags,
                "-v",
                "ON_ERROR_STOP=1",
                "-v",
                "VERBOSITY=verbose",
                "-c",
                text,
            ])
            .env("PGOPTIONS", format!("-c search_path={}", self.schema))
            .output()
            .expect("psql runs")
    }
}

pub async fn connect(address: &str) -> Client {
    connect_as(address, "postgres").await
}

pub async fn connect_as(address: &str, role: &str) -> Client {
    let [host, port, schema] = address.split(' ').collect::<Vec<_>>()[..] else { panic!("{address}") };
    let config =
        format!("host={host} port={port} user={role} dbname=postgres options='-c search_path={schema}'");
    let (client, connection) = tokio_postgres::connect(&config, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// What people do without a fence.
pub struct Plain(Client);

impl Plain {
    pub async fn open(address: &str) -> Arc<dyn Fenced> {
        let client = connect(address).await;
        // Two processes may make it at once.
        let made = client
            .batch_execute("CREATE TABLE IF NOT EXISTS plain (name text PRIMARY KEY, value bytea)")
            .await;
        if made.is_err() {
            client.query("SELECT FROM plain", &[]).await.unwrap();
        }
        Arc::new(Plain(client))
    }
}

#[async_trait]
impl Fenced for Plain {
    async fn put(&self, resource: &str, _: Fence, value: &[u8]) -> Result<()> {
        let sql = "INSERT INTO plain VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value";
        self.0.execute(sql, &[&resource, &value]).await.unwrap();
        Ok(())
    }

    async fn delete(&self, resource: &str, _: Fence) -> Result<()> {
        self.0.execute("DELETE FROM plain WHERE name = $1", &[&resource]).await.unwrap();
        Ok(())
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let row = self.0.query_opt("SELECT value FROM plain WHERE name = $1", &[&resource]).await.unwrap();
        Ok(row.map(|row| GuardedValue { fence: Fence::MIN, value: row.get(0) }))
    }
}
