//! The result of a take, and the refund of its tokens.

use std::time::Duration;

use lockkeeper_core::limit::{LimitOperation, LimitOutcome, LimitRequest};
use lockkeeper_core::{Error, Result};
use serde::Serialize;

use crate::keeper::Lockkeeper;

/// The state of one limit, as the store saw it when it answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LimitStatus {
    /// The key of the limit.
    pub key: String,
    /// Whether this limit allowed the request; for a peek, whether it would allow one token.
    pub allowed: bool,
    /// How many tokens could be taken at once.
    pub remaining: u64,
    /// How many tokens the full bucket holds.
    pub burst: u64,
    /// How long until as many tokens as were requested may be taken (again).
    pub retry_after: Duration,
    /// How long until the bucket is full.
    pub reset_after: Duration,
}

/// The answer to a take.
#[must_use = "the tokens may have been refused"]
#[derive(Debug)]
pub struct TakeOutcome {
    keeper: Lockkeeper,
    request: LimitRequest,
    outcome: LimitOutcome,
    keys: Vec<String>,
    /// The tokens that were taken and not given back.
    left: u64,
}

impl TakeOutcome {
    pub(super) fn new(
        keeper: Lockkeeper,
        request: LimitRequest,
        outcome: LimitOutcome,
        keys: Vec<String>,
        tokens: u64,
    ) -> Self {
        let took = outcome.allowed && matches!(request.operation, LimitOperation::Take { .. });
        TakeOutcome { keeper, request, outcome, keys, left: if took { tokens } else { 0 } }
    }

    /// Whether the tokens are the caller's.
    pub fn allowed(&self) -> bool {
        self.outcome.allowed
    }

    /// How many tokens are left after this take. Of several limits: of the one with the fewest.
    pub fn remaining(&self) -> u64 {
        self.outcome.remaining()
    }

    /// How long until the same take would be allowed (again).
    pub fn retry_after(&self) -> Duration {
        self.outcome.retry_after()
    }

    /// How long until the bucket is full. Of several limits: until all are full.
    pub fn reset_after(&self) -> Duration {
        self.outcome.reset_after()
    }

    /// The key of the limit that refused the take. If several did, the one that makes the caller wait longest.
    pub fn refused(&self) -> Option<&str> {
        self.outcome.refused.map(|i| &*self.keys[i])
    }

    /// The state of each limit of the request.
    pub fn statuses(&self) -> Vec<LimitStatus> {
        let limits = self.keys.iter().zip(&self.request.buckets).zip(&self.outcome.buckets);
        let status = |((key, bucket), state): (
            (&String, &lockkeeper_core::limit::LimitBucket),
            &lockkeeper_core::limit::BucketState,
        )| LimitStatus {
            key: key.clone(),
            allowed: self.outcome.allowed || state.retry_after.is_zero(),
            remaining: state.remaining,
            burst: bucket.spec.burst(),
            retry_after: state.retry_after,
            reset_after: state.reset_after,
        };
        limits.map(status).collect()
    }

    /// [`Error::Limited`] if the tokens were refused, for callers that treat a refusal as an error.
    pub fn require(self) -> Result<Self> {
        match self.refused() {
            None => Ok(self),
            Some(key) => Err(Error::Limited(format!(
                "the rate of {key} is used up: retry in {:.3} s",
                self.retry_after().as_secs_f64()
            ))),
        }
    }

    /// How long the caller must wait before it uses the tokens.
    pub(super) fn wait(&self) -> Duration {
        self.outcome.wait
    }

    pub(super) fn keeper(&self) -> &Lockkeeper {
        &self.keeper
    }

    /// Gives `n` of the taken tokens back, because they were not used. More than were taken, or a second time, is [`Error::Invalid`].
    ///
    /// A refund is best effort: it brings tokens back only if no other caller has taken from the bucket since, or all of those have given theirs
    /// back. Tokens that the bucket has refilled meanwhile are no longer missing. Of several limits each one decides for itself. If the call
    /// fails, the tokens count as given back here, so that a refund whose reply was lost is not repeated.
    pub async fn refund(&mut self, n: u64) -> Result<()> {
        let request = self.refund_request(n)?;
        self.keeper.0.store.limit(&request).await.map(drop)
    }

    /// The request that gives `n` tokens back, which then count as given back.
    pub(super) fn refund_request(&mut self, n: u64) -> Result<LimitRequest> {
        if n == 0 || n > self.left {
            return Err(Error::invalid(format!(
                "{n} tokens cannot be given back: this take has {} left",
                self.left
            )));
        }
        self.left -= n;
        let mut buckets = self.request.buckets.clone();
        for (bucket, state) in buckets.iter_mut().zip(&mut self.outcome.buckets) {
            (bucket.tokens, bucket.taken) = (n, state.full_at);
            // The rest of this take was taken that much earlier.
            state.full_at = state.full_at.saturating_sub(bucket.spec.cost_nanos(n));
        }
        Ok(LimitRequest { operation: LimitOperation::Refund, buckets })
    }

    /// The tokens that can still be given back.
    pub(super) fn left(&self) -> u64 {
        self.left
    }
}
