//! Releases holds and queue entries, and sends releases without a reply again.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::{ReleaseOutcome, RequestKey, Result};
use redis::{Value, cmd};

use crate::batch::{BatchSender, KeepFlag};
use crate::codec::release_flags;
use crate::connection::text_of;
use crate::error::unexpected_reply;
use crate::keys::KeyGroup;
use crate::runner::ScriptRunner;
use crate::unknown::{ReleaseRetry, UnansweredRelease, UnknownOutcomes};
use crate::waiters::Waiters;

/// Releases locks of one group. Clones share the store's state.
#[derive(Clone)]
pub(crate) struct Releaser {
    pub runner: Arc<ScriptRunner>,
    pub releases: BatchSender,
    pub waiters: Arc<Waiters>,
    pub unknown: Arc<UnknownOutcomes>,
}

impl Releaser {
    /// Releases a hold or a queue entry. Without a reply, also if the caller is cancelled, the store sends the release again.
    pub async fn release(&self, group: KeyGroup, key: &RequestKey) -> Result<ReleaseOutcome> {
        let mut in_flight = ReleaseInFlight { unknown: &self.unknown, release: Some((group, key)) };
        let outcome = self.release_once(group, key, 0, 0).await?;
        in_flight.release = None;
        self.waiters.forget_unconfirmed(&key.attempt.to_hex());
        Ok(outcome)
    }

    /// Sends one release. `flags`: [`release_flags`], besides those that follow from what this process knows of the attempt.
    /// `limit`: the highest fence that the release applies to; 0 for any.
    async fn release_once(
        &self,
        group: KeyGroup,
        key: &RequestKey,
        flags: u8,
        limit: u64,
    ) -> Result<ReleaseOutcome> {
        let keys: Vec<String> = key.names.iter().map(|name| self.runner.keys.lock_key(name)).collect();
        let attempt = key.attempt.to_hex();
        let guarded = if self.waiters.is_unconfirmed(&attempt) { release_flags::GUARDED } else { 0 };
        let args = vec![self.unknown.encode_release(attempt, keys.len(), flags | guarded, limit)];
        match self.releases.send(group, keys, args, KeepFlag::default()).await? {
            Value::Int(1) => Ok(ReleaseOutcome::Released),
            Value::Int(_) => Ok(ReleaseOutcome::AlreadyGone),
            _ => Err(unexpected_reply()),
        }
    }

    /// Sends releases without a reply again while the store is open, each after a pause of its own, so a silent node delays no release
    /// at another. They apply only to a queue entry or an unconfirmed hold, for which no guard exists: the ttl ends a confirmed hold.
    pub async fn run(self) {
        let mut sends = FuturesUnordered::new();
        loop {
            tokio::select! {
                due = self.unknown.due_releases() => sends.extend(due.into_iter().map(|retry| self.send_again(retry))),
                Some(()) = sends.next(), if !sends.is_empty() => {}
            }
        }
    }

    /// Sends a release again, unless its caller acquires again meanwhile.
    async fn send_again(&self, retry: ReleaseRetry) {
        let outcome = tokio::select! {
            biased;
            () = retry.superseded.cancelled() => Ok(()),
            outcome = self.retry_release(&retry) => outcome,
        };
        self.unknown.end_retry(retry, outcome.is_ok());
    }

    /// Sends a release that must not end what the attempt acquires after it: that has a higher fence or ticket than the server has
    /// issued so far. The first round leaves the tombstone; the second ends a request that arrived just before the tombstone.
    async fn retry_release(&self, retry: &ReleaseRetry) -> Result<()> {
        let UnansweredRelease { group, key, limit, .. } = &retry.release;
        if let Some(limit) = limit {
            return self.release_once(*group, key, release_flags::UNCONFIRMED, *limit).await.map(drop);
        }
        for _ in 0..2 {
            let limit = self.highest_issued(*group).await?;
            // The caller acquires again: the limit may be that of the fence or ticket that it gets.
            if retry.superseded.is_cancelled() {
                return Ok(());
            }
            self.release_once(*group, key, release_flags::UNCONFIRMED, limit).await?;
        }
        Ok(())
    }

    /// The highest fence or ticket that the server has issued.
    async fn highest_issued(&self, group: KeyGroup) -> Result<u64> {
        let counter = cmd("GET").arg(format!("{}fence", self.runner.keys.group_prefix(group))).to_owned();
        let highest = self.runner.router.call(group.slot(), &counter).await?;
        let highest = text_of(&highest).and_then(|text| text.parse().ok());
        // 0 would mean no limit.
        Ok(highest.unwrap_or(0).max(1))
    }
}

/// A release in flight. Dropping it without a reply schedules the release again.
struct ReleaseInFlight<'a> {
    unknown: &'a UnknownOutcomes,
    release: Option<(KeyGroup, &'a RequestKey)>,
}

impl Drop for ReleaseInFlight<'_> {
    fn drop(&mut self) {
        if let Some((group, key)) = self.release {
            self.unknown.schedule_release(UnansweredRelease::new(group, key.clone(), None));
        }
    }
}
