//! Approximate on purpose: tokens are taken by the batch, and this process decides about each of them.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Result};
use tokio::sync::Mutex;

use super::RateLimit;

/// A rate limit for a key that is too hot for one shard of the store: this process takes tokens by the batch, and most takes need no round
/// trip. Made by [`RateLimit::prefetch`]. Clones share the batch.
///
/// **The bound**: a token that a process has prefetched may be used later than the store gave it. So in any time t all processes together use at
/// most `rate × t + burst + members × batch` tokens, and they can reach that: when all of them hold a batch while the bucket fills up. Over a long time
/// the rate is exact, because every token comes from the store.
///
/// While the limit is used up, this process refuses without a round trip until the store would allow again. It does not learn of a reset or a
/// refund before that. Tokens of a batch that are never used are lost when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct PrefetchedLimit {
    limit: RateLimit,
    batch: u64,
    local: Arc<Mutex<LocalTokens>>,
}

/// The tokens that this process has.
#[derive(Debug, Default)]
struct LocalTokens {
    tokens: u64,
    /// Until when the store would refuse, and how many tokens.
    refused: Option<(BootInstant, u64)>,
}

/// The answer to a take of a [`PrefetchedLimit`].
#[must_use = "the tokens may have been refused"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchOutcome {
    /// Whether the tokens are the caller's.
    pub allowed: bool,
    /// For a refusal: how long until the same take may be allowed.
    pub retry_after: Duration,
}

impl PrefetchedLimit {
    pub(super) fn new(limit: RateLimit, batch: u64) -> Self {
        PrefetchedLimit { limit, batch, local: Arc::default() }
    }

    /// Takes `n` tokens, or none. Without a round trip as long as the batch lasts; callers that need the next batch wait for one that fetches it.
    ///
    /// A batch of 0, or above the burst, is [`Error::Invalid`]. Dropping the future may lose a batch.
    pub async fn take(&self, n: u64) -> Result<PrefetchOutcome> {
        self.check(n)?;
        let clock = &*self.limit.keeper().0.clock;
        let mut local = self.local.lock().await;
        let missing = n.saturating_sub(local.tokens);
        if missing == 0 {
            local.tokens -= n;
            return Ok(PrefetchOutcome { allowed: true, retry_after: Duration::ZERO });
        }
        let now = clock.now();
        if let Some((until, _)) = local.refused.filter(|(until, tokens)| now < *until && missing >= *tokens) {
            return Ok(PrefetchOutcome { allowed: false, retry_after: until.since(now) });
        }
        let batch = self.batch.max(missing);
        let mut fetched = batch;
        let mut outcome = self.limit.take(batch).await?;
        if !outcome.allowed() && missing < batch {
            // The bucket has no batch: take what this caller needs.
            fetched = missing;
            outcome = self.limit.take(missing).await?;
        }
        if outcome.allowed() {
            local.tokens = local.tokens + fetched - n;
            local.refused = None;
            return Ok(PrefetchOutcome { allowed: true, retry_after: Duration::ZERO });
        }
        let retry_after = outcome.retry_after();
        local.refused = Some((now + retry_after, missing));
        Ok(PrefetchOutcome { allowed: false, retry_after })
    }

    fn check(&self, n: u64) -> Result<()> {
        if n == 0 {
            return Err(Error::invalid("0 tokens: take at least 1"));
        }
        if self.batch == 0 {
            return Err(Error::invalid("the batch is 0: prefetch at least 1 token"));
        }
        let burst = self.limit.bucket(n)?.spec.burst();
        if self.batch.max(n) > burst {
            return Err(Error::invalid(format!(
                "the batch of {} and a take of {n} must not be above the burst of {burst}: the store would refuse them for ever",
                self.batch
            )));
        }
        Ok(())
    }
}
