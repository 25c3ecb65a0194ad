//! The trait of a cache of the user's, in which values are kept instead of in records.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Fence, Result};

/// A value as a cache returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FencedValue {
    /// The value.
    pub bytes: Vec<u8>,
    /// The fence that it was stored with.
    pub fence: Fence,
}

/// The answer to [`ValueCache::put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The cache has the value.
    Stored,
    /// The cache has seen this newer fence, and has not stored the value.
    Stale(Fence),
}

/// A cache that keeps values and their fences (fencing tokens).
///
/// The locks, and whether a value is fresh, stay in the keeper's store. A value counts only if its fence is
/// not older than the one that the store names, so a cache may forget a value at any time: then a caller
/// computes it anew.
#[async_trait]
pub trait ValueCache: Send + Sync + Debug {
    /// The value of a key and its fence, read in one step. `None`: there is no such value.
    async fn get(&self, key: &str) -> Result<Option<FencedValue>>;

    /// Stores a value with its fence for `ttl`, in one step, unless the cache has seen a newer fence for
    /// the key. The same fence is stored again.
    async fn put(&self, key: &str, value: &[u8], fence: Fence, ttl: Duration) -> Result<PutOutcome>;
}
