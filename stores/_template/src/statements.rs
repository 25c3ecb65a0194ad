//! Exactly what the store sends to the backend. Each statement is one atomic step: it compares and changes in one.

use std::time::Duration;

use lockkeeper_core::{Fence, Holder};

use crate::acquire::AcquireReply;
use crate::codec::{self, StoredLock};
use crate::connection::TemplateConnection;
use crate::error::Failure;

impl TemplateConnection {
    /// If the lock is free or expired: counts the fence on (`Fence::after`), and stores it with the hash, the holder and the end of the
    /// lease. If the hash is the stored one: returns the stored fence, and the lease counts anew.
    pub async fn acquire(
        &self,
        _key: &str,
        _attempt_hash: &str,
        _holder: &Holder,
        _ttl: Duration,
    ) -> Result<AcquireReply, Failure> {
        self.send("acquire").await?;
        Err(Failure::NotWritten("acquire"))
    }

    /// If the hash is the stored one and the lease has not ended: the lease counts anew. Returns whether it does.
    pub async fn renew(&self, _key: &str, _attempt_hash: &str, _ttl: Duration) -> Result<bool, Failure> {
        Ok(!self.send("renew").await?.is_empty())
    }

    /// If the hash is the stored one and the lease has not ended: removes the holder. The fence stays. Returns whether it removed one.
    pub async fn release(&self, _key: &str, _attempt_hash: &str) -> Result<bool, Failure> {
        Ok(!self.send("release").await?.is_empty())
    }

    /// Reads the lock.
    pub async fn inspect(&self, _key: &str) -> Result<Option<StoredLock>, Failure> {
        codec::decode(&self.send("inspect").await?)
    }

    /// Counts the fence on and removes the holder, in one step. Also if the lock is free.
    pub async fn break_lock(&self, _key: &str) -> Result<Fence, Failure> {
        self.send("break a lock").await?;
        Err(Failure::NotWritten("break a lock"))
    }
}
