//! The store and the `Locks` trait, thin: checks, one statement, and the answer. A longer operation gets a file of its own.

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Page,
    Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};

use crate::config::Options;
use crate::connection::TemplateConnection;
use crate::keys::{TemplateKeys, attempt_hash};
use crate::profile::profile;

/// A store to copy.
#[derive(Clone, Debug)]
pub struct TemplateStore {
    pub(crate) options: Options,
    pub(crate) keys: TemplateKeys,
    pub(crate) connection: TemplateConnection,
}

impl TemplateStore {
    /// Opens the store. Fill in: connect, read the settings of the server, and refuse those under which locks would not exclude.
    ///
    /// # Errors
    /// [`lockkeeper_core::Error::Unavailable`] if no server answers.
    pub fn open(options: Options) -> Result<Self> {
        let (keys, connection) = (TemplateKeys::new(&options.prefix), TemplateConnection::new(&options));
        Ok(TemplateStore { options, keys, connection })
    }
}

#[async_trait]
impl Locks for TemplateStore {
    fn profile(&self) -> Profile {
        profile()
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        profile().check_features(request)?;
        self.try_acquire(request).await
    }

    /// Fill in: one call for all grants. If some have no answer, those are `RenewOutcome::Unknown`, and the others keep theirs.
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let mut outcomes = Vec::new();
        for Grant { key, ttl, .. } in grants {
            let (lock, hash) = (self.keys.lock(key.names.first()), attempt_hash(&key.attempt));
            let renewed = self.connection.renew(&lock, &hash, *ttl).await?;
            outcomes.push(if renewed { RenewOutcome::Renewed } else { RenewOutcome::Lost });
        }
        Ok(outcomes)
    }

    /// Fill in: also the wait of a request that is not granted yet.
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let (lock, hash) = (self.keys.lock(key.names.first()), attempt_hash(&key.attempt));
        let released = self.connection.release(&lock, &hash).await?;
        Ok(if released { ReleaseOutcome::Released } else { ReleaseOutcome::AlreadyGone })
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let stored = self.connection.inspect(&self.keys.lock(name)).await?;
        let holder = stored.and_then(|stored| stored.holder);
        Ok(holder.map(|holder| LockView::exclusive(name.clone(), holder)))
    }

    /// Fill in: names after `page.after` that begin with `prefix`, in byte order, at most `page.size()`; `next` is the last of them
    /// if there are more; `LockPage::select` does that for a backend without an order. No feature of the profile stands for it: every store has it.
    async fn list(&self, _prefix: &str, _page: &Page) -> Result<LockPage> {
        Err(profile().lacks("lists"))
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        Err(profile().lacks("watches"))
    }

    async fn revoke(&self, _name: &LockName, _reason: &str) -> Result<Fence> {
        Err(profile().lacks("revoke"))
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        Ok(self.connection.break_lock(&self.keys.lock(name)).await?)
    }
}
