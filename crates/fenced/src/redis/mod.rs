//! Redis: SET, HSET and DEL that refuse a late writer, each by one script, on one server or a cluster.

mod error;
mod keys;

pub use keys::mark_key;
// The crate of the connections.
pub use redis;

use std::sync::LazyLock;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Error, Fence, Result};
use redis::aio::ConnectionLike;
use redis::{Cmd, RedisResult, Script, Value};

use crate::{Fenced, GuardedValue, verdict};
use error::to_error;

static WRITE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("write.lua")));
static READ: LazyLock<(Script, &str)> = LazyLock::new(|| {
    let text = "return {redis.call('GET', KEYS[2]), redis.call('GET', KEYS[1])}";
    (Script::new(text), text)
});

/// Keys whose writers are checked. The mark of a key is in a key of its own beside it, in the same hash slot, and never expires.
///
/// Any connection of the crate `redis` will do that can be cloned: a multiplexed one, a `ConnectionManager`, a cluster's. A connection that sends
/// again what may have happened does no harm here.
#[derive(Clone)]
pub struct RedisFenced<C> {
    connection: C,
}

impl<C: ConnectionLike + Clone + Send + Sync> RedisFenced<C> {
    /// Over this connection.
    pub fn new(connection: C) -> Self {
        RedisFenced { connection }
    }

    /// `SET key value`. An old time to live of the key goes, as with every SET.
    ///
    /// # Errors
    /// [`Error::Stale`] if a higher fence was seen: nothing has changed. [`Error::Unknown`] if no answer came: send the same again.
    pub async fn set(&self, key: impl AsRef<[u8]>, fence: Fence, value: impl AsRef<[u8]>) -> Result<()> {
        self.write(key.as_ref(), fence, "SET", &[value.as_ref()]).await
    }

    /// `SET key value PX ttl`: the value goes after that time, and the mark stays.
    ///
    /// # Errors
    /// As [`RedisFenced::set`]; [`Error::Invalid`] if it is less than a millisecond.
    pub async fn set_for(
        &self,
        key: impl AsRef<[u8]>,
        fence: Fence,
        value: impl AsRef<[u8]>,
        ttl: Duration,
    ) -> Result<()> {
        let ms = ttl.as_millis();
        if ms == 0 || ms > 1 << 50 {
            return Err(Error::invalid(format!("a value cannot go after {ttl:?}")));
        }
        self.write(key.as_ref(), fence, "SET", &[value.as_ref(), b"PX", ms.to_string().as_bytes()]).await
    }

    /// `HSET key field value …`. The mark is that of the whole hash.
    ///
    /// # Errors
    /// As [`RedisFenced::set`]; [`Error::Invalid`] if there are no fields, or the key holds something else.
    pub async fn hset<F, V>(&self, key: impl AsRef<[u8]>, fence: Fence, fields: &[(F, V)]) -> Result<()>
    where
        F: AsRef<[u8]>,
        V: AsRef<[u8]>,
    {
        if fields.is_empty() {
            return Err(Error::invalid("HSET needs a field"));
        }
        let words: Vec<&[u8]> =
            fields.iter().flat_map(|(field, value)| [field.as_ref(), value.as_ref()]).collect();
        self.write(key.as_ref(), fence, "HSET", &words).await
    }

    /// `DEL key`, whatever it holds. The mark stays, and deleting nothing counts.
    ///
    /// # Errors
    /// As [`RedisFenced::set`].
    pub async fn del(&self, key: impl AsRef<[u8]>, fence: Fence) -> Result<()> {
        self.write(key.as_ref(), fence, "DEL", &[]).await
    }

    /// The highest fence that was seen for a key.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if no answer came.
    pub async fn mark(&self, key: impl AsRef<[u8]>) -> Result<Option<Fence>> {
        let mut get = redis::cmd("GET");
        get.arg(mark_key(key.as_ref()));
        let mark = get.query_async(&mut self.connection.clone()).await.map_err(|e| to_error(&e, false))?;
        parsed(mark)
    }

    async fn write(&self, key: &[u8], fence: Fence, what: &str, words: &[&[u8]]) -> Result<()> {
        let call = |name: &str, script: &str| {
            let mut call = eval(name, script, key);
            call.arg(fence.get()).arg(what).arg(words);
            call
        };
        let mark = self.run(&WRITE, include_str!("write.lua"), call).await.map_err(|e| to_error(&e, true))?;
        let mark =
            redis::from_redis_value(mark).map_err(|e| Error::Unknown(format!("Redis gave no mark: {e}")))?;
        match parsed(mark)? {
            Some(mark) => verdict("redis", fence, mark),
            None => Err(Error::Unknown("Redis gave no mark".into())),
        }
    }

    /// By its hash; by its text if the server does not know it yet. Both are routed by their keys, also in a cluster.
    async fn run(&self, script: &Script, text: &str, call: impl Fn(&str, &str) -> Cmd) -> RedisResult<Value> {
        let mut connection = self.connection.clone();
        match call("EVALSHA", script.get_hash()).query_async(&mut connection).await {
            Err(e) if e.code() == Some("NOSCRIPT") => call("EVAL", text).query_async(&mut connection).await,
            answer => answer,
        }
    }
}

fn eval(name: &str, script: &str, key: &[u8]) -> Cmd {
    let mut call = redis::cmd(name);
    call.arg(script).arg(2).arg(key).arg(mark_key(key));
    call
}

fn parsed(mark: Option<String>) -> Result<Option<Fence>> {
    let Some(mark) = mark else { return Ok(None) };
    crate::fence(mark.parse().unwrap_or(0)).map(Some)
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync> Fenced for RedisFenced<C> {
    async fn put(&self, resource: &str, fence: Fence, value: &[u8]) -> Result<()> {
        self.set(resource, fence, value).await
    }

    async fn delete(&self, resource: &str, fence: Fence) -> Result<()> {
        self.del(resource, fence).await
    }

    async fn read(&self, resource: &str) -> Result<Option<GuardedValue>> {
        let call = |name: &str, script: &str| eval(name, script, resource.as_bytes());
        let both = self.run(&READ.0, READ.1, call).await.map_err(|e| to_error(&e, false))?;
        let (mark, value): (Option<String>, Option<Vec<u8>>) = redis::from_redis_value(both)
            .map_err(|e| Error::Invalid(format!("Redis gave another kind of value: {e}")))?;
        Ok(parsed(mark)?.map(|fence| GuardedValue { fence, value }))
    }
}
