//! Cached values in Redis: each under its own key, as plain bytes that every Redis client can read.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Fence, Result};
use lockkeeper_redis::{FencedValues, Options};

use super::value_cache::{FencedValue, PutOutcome, ValueCache};

/// A [`ValueCache`] in Redis. The value of `key` is at `PREFIX` + `key`, as it is: other clients read it with
/// `GET`. They must not write it.
///
/// The fence is in a key of its own, `lockkeeper:{…}:value-fence:…`, which the server keeps for an hour
/// longer than the value: for that long it refuses a late writer.
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// # use lockkeeper::cached::RedisCache;
/// # async fn render(_: lockkeeper::Fence) -> Result<Vec<u8>, String> { Ok(Vec::new()) }
/// let keeper = lockkeeper::Lockkeeper::open("postgres://HOST/DATABASE").await?;
/// let cache = Arc::new(RedisCache::open("redis://HOST", "page:").await?);
/// let home = keeper.cached("home").in_cache(cache).get_bytes(render).await?;      // redis-cli GET page:home
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RedisCache(FencedValues);

impl RedisCache {
    /// Connects to the servers of a `redis://` URL, also one with Sentinel or a cluster. `prefix` stands
    /// before every key.
    ///
    /// The server may evict keys: a value that is gone is computed again.
    pub async fn open(url: &str, prefix: &str) -> Result<RedisCache> {
        let mut options = Options::from_url(url)?;
        options.prefix = prefix.to_owned();
        Ok(RedisCache(FencedValues::open(options).await?))
    }
}

#[async_trait]
impl ValueCache for RedisCache {
    async fn get(&self, key: &str) -> Result<Option<FencedValue>> {
        Ok(self.0.get(key).await?.map(|(bytes, fence)| FencedValue { bytes, fence }))
    }

    async fn put(&self, key: &str, value: &[u8], fence: Fence, ttl: Duration) -> Result<PutOutcome> {
        Ok(match self.0.put(key, value, fence, ttl).await? {
            Ok(()) => PutOutcome::Stored,
            Err(newer) => PutOutcome::Stale(newer),
        })
    }
}
