//! The answer of a store to a request.

use std::time::Duration;

use crate::limit::{LimitBucket, LimitOperation, LimitRequest};

/// A bucket after the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketState {
    /// How many tokens the next take without a wait may have.
    pub remaining: u64,
    /// How long until as many tokens as the request is about may be taken (again). Zero: now.
    pub retry_after: Duration,
    /// How long until the bucket is full.
    pub reset_after: Duration,
    /// The instant at which the bucket is full, in nanoseconds of the store's clock. A refund sends it back; it means nothing else to a client.
    pub full_at: u64,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitOutcome {
    /// Whether the tokens are taken; for a peek, whether they could be. Always true for a reset and a refund.
    pub allowed: bool,
    /// How long the caller waits before it uses the tokens. Zero unless the request allowed a wait.
    pub wait: Duration,
    /// The bucket that refused, by its position in the request: the one that makes the caller wait longest.
    pub refused: Option<usize>,
    /// The buckets, in the order of the request.
    pub buckets: Vec<BucketState>,
}

impl LimitOutcome {
    /// The answer that follows from what a store has seen: whether it allowed the request, its clock, and for each bucket the instant at which
    /// the bucket is full after the request.
    pub fn observed(request: &LimitRequest, allowed: bool, now: u64, full_at: &[u64]) -> Self {
        let states = request.buckets.iter().zip(full_at);
        let buckets: Vec<BucketState> = states.map(|(bucket, at)| state(bucket, now, *at)).collect();
        let slowest = (0..buckets.len()).rev().max_by_key(|i| buckets[*i].retry_after);
        let wait = match (request.operation, request.buckets.first(), full_at.first()) {
            (LimitOperation::Take { .. }, Some(bucket), Some(at)) if allowed => {
                Duration::from_nanos(at.saturating_sub(bucket.spec.fill_nanos()).saturating_sub(now))
            }
            _ => Duration::ZERO,
        };
        LimitOutcome { allowed, wait, refused: slowest.filter(|_| !allowed), buckets }
    }

    /// How long until the request would be allowed (again), as far as this answer knows.
    pub fn retry_after(&self) -> Duration {
        self.buckets.iter().map(|bucket| bucket.retry_after).max().unwrap_or_default()
    }

    /// The tokens of the bucket that has the fewest.
    pub fn remaining(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.remaining).min().unwrap_or_default()
    }

    /// How long until all buckets are full.
    pub fn reset_after(&self) -> Duration {
        self.buckets.iter().map(|bucket| bucket.reset_after).max().unwrap_or_default()
    }
}

fn state(bucket: &LimitBucket, now: u64, full_at: u64) -> BucketState {
    let spec = &bucket.spec;
    let ahead = full_at.saturating_sub(now);
    let short = (ahead + spec.cost_nanos(bucket.tokens)).saturating_sub(spec.fill_nanos());
    BucketState {
        remaining: spec.fill_nanos().saturating_sub(ahead) / spec.token_nanos(),
        retry_after: Duration::from_nanos(short),
        reset_after: Duration::from_nanos(ahead),
        full_at: full_at.max(now),
    }
}
