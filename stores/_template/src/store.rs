//! The store and the `Locks` trait, thin: checks, one statement, and the answer. A longer operation gets a file of its own.

use async_trait::async_trait;
use lockkeeper_core::{
    AcquireOutcome, Busy, EventStream, Fence, Grant, LockName, LockPage, LockRequest, LockView, Locks, Mode,
    Page, Profile, ReleaseOutcome, RenewOutcome, RequestKey, Result, limits,
};

use crate::config::Options;
use crate::keys::{TemplateKeys, attempt_hash};
use crate::profile::{check_features, profile, unsupported};
use crate::statements::{self, AcquireReply};

/// A store to copy.
#[derive(Clone, Debug)]
pub struct TemplateStore {
    options: Options,
    pub(crate) keys: TemplateKeys,
}

impl TemplateStore {
    /// Opens the store. Fill in: connect, read the settings of the server, and refuse those under which locks would not exclude.
    ///
    /// # Errors
    /// [`lockkeeper_core::Error::Unavailable`] if no server answers.
    pub fn open(options: Options) -> Result<Self> {
        Ok(TemplateStore { keys: TemplateKeys::new(&options.prefix), options })
    }
}

#[async_trait]
impl Locks for TemplateStore {
    fn profile(&self) -> Profile {
        profile()
    }

    /// Fill in: the wait. Until `request.wait.deadline(now)`, enqueue or poll. A release of the same attempt from another task ends the
    /// wait and returns `Released`; no grant may follow it. A dropped future leaves no task that could still be granted the lock.
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        request.check()?;
        check_features(request)?;
        let (key, name, ttl) = (request.key.clone(), request.key.names.first(), request.ttl);
        // Before the request leaves, for every try anew: the guard's deadline counts from here.
        let sent_at = self.options.clock.now();
        let hash = attempt_hash(&key.attempt);
        Ok(match statements::acquire(&self.keys.lock(name), &hash, &request.holder, ttl).await? {
            AcquireReply::Granted(fence) => {
                AcquireOutcome::Granted(Grant { key, fence, mode: Mode::Exclusive, ttl, sent_at, lease: ttl })
            }
            AcquireReply::Busy(holder) => {
                AcquireOutcome::Busy(Busy { name: name.clone(), held: vec![*holder], waiting: 0 })
            }
        })
    }

    /// Fill in: one call for all grants. If some have no answer, those are `RenewOutcome::Unknown`, and the others keep theirs.
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        let mut outcomes = Vec::new();
        for Grant { key, ttl, .. } in grants {
            let (lock, hash) = (self.keys.lock(key.names.first()), attempt_hash(&key.attempt));
            let renewed = statements::renew(&lock, &hash, *ttl).await?;
            outcomes.push(if renewed { RenewOutcome::Renewed } else { RenewOutcome::Lost });
        }
        Ok(outcomes)
    }

    /// Fill in: also the wait of a request that is not granted yet.
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let (lock, hash) = (self.keys.lock(key.names.first()), attempt_hash(&key.attempt));
        let released = statements::release(&lock, &hash).await?;
        Ok(if released { ReleaseOutcome::Released } else { ReleaseOutcome::AlreadyGone })
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let holder = statements::inspect(&self.keys.lock(name)).await?;
        Ok(holder.map(|holder| LockView {
            name: name.clone(),
            held: vec![holder],
            queue: Vec::new(),
            waiting: 0,
            delayed_ms: None,
        }))
    }

    /// Fill in: names after `page.after` that begin with `prefix`, in byte order, at most `page.size()`; `next` is the last of them
    /// if there are more. No feature of the profile stands for it: every store has it.
    async fn list(&self, _prefix: &str, _page: &Page) -> Result<LockPage> {
        unsupported("lists")
    }

    async fn watch(&self, _prefix: &str) -> Result<EventStream> {
        unsupported("watches")
    }

    async fn revoke(&self, _name: &LockName, _reason: &str) -> Result<Fence> {
        unsupported("revoke")
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        Ok(statements::break_lock(&self.keys.lock(name)).await?)
    }
}
