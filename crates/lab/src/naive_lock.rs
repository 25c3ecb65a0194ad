//! The lock that everyone writes at first: a row with a time stamp, or `SET NX PX` and `DEL`. Implemented with care, and wrong.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockkeeper::Result;
use lockkeeper_testkit::servers::redis_call;
use rusqlite::{Connection, params};

use crate::worker::unavailable;

/// The pause of a waiter between two tries.
const POLL: Duration = Duration::from_millis(20);
/// The ttl of a lock without one, so that a run that is killed leaves no key in a server of the user. No scenario lasts as long.
const NEVER: Duration = Duration::from_secs(60 * 60);

/// The naive lock. Its release checks no owner, nothing renews it, and it has no fence.
#[derive(Debug)]
pub enum NaiveLock {
    /// A table with a row for each lock: the holder, and the time at which the row is worth nothing.
    Row(Mutex<Connection>),
    /// `SET NAME HOLDER NX PX TTL` and `DEL NAME`.
    Redis(SocketAddr),
}

impl NaiveLock {
    /// The lock on the Redis server of this URL, else in a database file in `dir`.
    pub fn open(store: &str, dir: &Path) -> Result<NaiveLock> {
        if let Some(addr) = store.strip_prefix("redis://").and_then(|addr| addr.parse().ok()) {
            return Ok(NaiveLock::Redis(addr));
        }
        let db = Connection::open(dir.join("naive.db")).map_err(unavailable)?;
        db.busy_timeout(Duration::from_secs(30)).map_err(unavailable)?;
        let create = "CREATE TABLE IF NOT EXISTS locks (name TEXT PRIMARY KEY, holder TEXT, expires REAL)";
        db.execute(create, []).map_err(unavailable)?;
        Ok(NaiveLock::Row(Mutex::new(db)))
    }

    /// Takes the lock if it is free. Without a ttl it is taken until a release.
    pub fn take(&self, name: &str, holder: &str, ttl: Option<Duration>) -> Result<bool> {
        let ttl = ttl.unwrap_or(NEVER);
        match self {
            NaiveLock::Row(db) => {
                let now = seconds();
                let take = "INSERT INTO locks VALUES (?1, ?2, ?3) ON CONFLICT (name)
                    DO UPDATE SET holder = ?2, expires = ?3 WHERE expires < ?4";
                let until = now + ttl.as_secs_f64();
                let db = db.lock().unwrap_or_else(PoisonError::into_inner);
                db.execute(take, params![name, holder, until, now]).map(|rows| rows == 1).map_err(unavailable)
            }
            NaiveLock::Redis(addr) => {
                let ttl = ttl.as_millis().to_string();
                redis_call(*addr, &["SET", name, holder, "NX", "PX", &ttl])
                    .map(|answer| answer == "OK")
                    .map_err(unavailable)
            }
        }
    }

    /// Waits until the lock is free, and takes it.
    pub async fn wait_and_take(&self, name: &str, holder: &str, ttl: Option<Duration>) -> Result<()> {
        while !self.take(name, holder, ttl)? {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Frees the lock, whose ever it is: this is the mistake.
    pub fn free(&self, name: &str) -> Result<()> {
        match self {
            NaiveLock::Row(db) => {
                let db = db.lock().unwrap_or_else(PoisonError::into_inner);
                db.execute("DELETE FROM locks WHERE name = ?1", [name]).map(drop).map_err(unavailable)
            }
            NaiveLock::Redis(addr) => redis_call(*addr, &["DEL", name]).map(drop).map_err(unavailable),
        }
    }
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
