//! Requests that may still be in the queue, because a transaction that should have removed them failed. The worker removes
//! them with its next transaction: until then they block the waiters behind them.

use std::collections::HashMap;
use std::time::Duration;

use lockkeeper_core::{Attempt, BootInstant, RequestKey};

/// How long the worker waits for another transaction before it starts one for the removal alone.
const RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct UnknownOutcomes {
    keys: HashMap<Attempt, RequestKey>,
    retry_at: Option<BootInstant>,
}

impl UnknownOutcomes {
    pub fn add(&mut self, now: BootInstant, key: RequestKey) {
        self.retry_at = Some(now + RETRY_DELAY);
        self.keys.insert(key.attempt, key);
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The caller has sent the same request again, so it must stay in the queue.
    pub fn forget(&mut self, attempt: &Attempt) {
        self.keys.remove(attempt);
    }

    /// When the worker removes them at the latest.
    pub fn retry_at(&self) -> Option<BootInstant> {
        self.retry_at
    }

    pub fn take_all(&mut self) -> impl Iterator<Item = RequestKey> {
        self.retry_at = None;
        self.keys.drain().map(|(_, key)| key)
    }
}
