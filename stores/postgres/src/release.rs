//! Releasing a lock, or leaving its queue.

use lockkeeper_core::{ReleaseOutcome, RequestKey, Result};

use crate::acquire::LockClient;
use crate::batch::{RequestKind, RequestParams};
use crate::codec::{hash, unexpected_reply};
use crate::unknown::{RELEASE_AGAIN_AFTER, UnknownOutcomes};

impl LockClient {
    /// Releases a request. If it fails, or the caller goes away, the store sends the release again in the background.
    pub async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        let first_of_two = self.unknown.begin_release(key);
        let mut guard = ReleaseInProgress { unknown: &self.unknown, key, first_of_two, confirmed: false };
        let outcome = self.send_release(key).await;
        guard.confirmed = outcome.is_ok();
        outcome
    }

    pub async fn send_release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.waiters.end(key);
        let mut params = RequestParams {
            kind: RequestKind::Release,
            fast_path: self.fast_path_grants.remove([&key.attempt]),
            names: key.names.iter().map(|name| name.as_str().to_owned()).collect(),
            attempt: hash(&key.attempt),
            ttl: None,
            terms: None,
            holder: None,
        };
        let mut text = self.batch.send(params.clone()).await?.text;
        if text.is_empty() {
            params.fast_path = false;
            text = self.batch.send(params).await?.text;
        }
        match text.as_str() {
            "+" => Ok(ReleaseOutcome::Released),
            "-" => Ok(ReleaseOutcome::AlreadyGone),
            _ => Err(unexpected_reply()),
        }
    }
}

/// A release in flight. It has to happen also if its caller goes away.
struct ReleaseInProgress<'a> {
    unknown: &'a UnknownOutcomes,
    key: &'a RequestKey,
    /// The outcome of the request was unknown: its release is repeated later.
    first_of_two: bool,
    confirmed: bool,
}

impl Drop for ReleaseInProgress<'_> {
    fn drop(&mut self) {
        match (self.confirmed, self.first_of_two) {
            (true, true) => self.unknown.released(&self.key.attempt),
            (true, false) => {}
            (false, true) => self.unknown.put_off(&self.key.attempt),
            (false, false) => self.unknown.add(self.key, RELEASE_AGAIN_AFTER),
        }
    }
}
