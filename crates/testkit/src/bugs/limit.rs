//! Rate limits of a store with a planted bug.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::limit::{BucketSpec, LimitBucket, LimitOperation, LimitOutcome, LimitRequest, Rate};
use lockkeeper_core::{ClockReading, Examination, Examine, Expect, Limits, LockName, Result, WallTime};

use super::{Bug, Bugged};

const TAKE: LimitOperation = LimitOperation::Take { wait: Duration::ZERO };

fn one(operation: LimitOperation, bucket: &LimitBucket, tokens: u64) -> LimitRequest {
    LimitRequest { operation, buckets: vec![LimitBucket { tokens, ..bucket.clone() }] }
}

impl Bugged {
    /// The request, as the bug changes it.
    fn twist_limit(&self, request: &LimitRequest) -> LimitRequest {
        let mut request = request.clone();
        for bucket in &mut request.buckets {
            let spec = &bucket.spec;
            let same = |key: LockName, nanos: u64| {
                BucketSpec::new(key, Rate::new(1, Duration::from_nanos(nanos)).expect("a rate"), spec.burst())
                    .expect("a bucket")
            };
            match self.bug() {
                Bug::RefillsThrice => bucket.spec = same(spec.key().clone(), spec.token_nanos() / 3),
                Bug::OneBucketForAll => {
                    bucket.spec = same(LockName::new("limit/all").expect("a name"), spec.token_nanos());
                }
                Bug::LimitUnchecked => bucket.tokens = bucket.tokens.min(spec.burst()),
                _ => {}
            }
        }
        match (self.bug(), request.operation) {
            (Bug::PeekTakes, LimitOperation::Peek) => request.operation = TAKE,
            (Bug::ResetIsForgotten, LimitOperation::Reset) => request.operation = LimitOperation::Peek,
            (Bug::RefundFills, LimitOperation::Refund) => request.operation = LimitOperation::Reset,
            (Bug::RefundIsLost, LimitOperation::Refund) => request.operation = LimitOperation::Peek,
            _ => {}
        }
        request
    }

    /// The first caller that has to wait gets the second place, and the next caller the first one.
    async fn take_out_of_turn(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        let now = self.wall().map_or(0, WallTime::as_micros);
        let left_free = self.limit_clock().swap(0, Ordering::Relaxed);
        if left_free != 0 {
            let peek = LimitRequest { operation: LimitOperation::Peek, ..request.clone() };
            let wait = Duration::from_micros(left_free.saturating_sub(now));
            return Ok(LimitOutcome {
                allowed: true,
                wait,
                refused: None,
                ..self.store().limit(&peek).await?
            });
        }
        let first = self.store().limit(request).await?;
        if !first.allowed || first.wait.is_zero() {
            return Ok(first);
        }
        self.limit_clock().store(now + first.wait.as_micros() as u64, Ordering::Relaxed);
        self.store().limit(request).await
    }

    /// Whether the wall clock is before the last take: what a store would see that counts by it.
    fn wall_went_back(&self) -> bool {
        let wall = self.wall().map_or(0, WallTime::as_micros);
        let newest = self.limit_clock().fetch_max(wall, Ordering::Relaxed);
        wall < newest
    }
}

#[async_trait]
impl Limits for Bugged {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        let twisted = self.twist_limit(request);
        let store = self.store();
        let takes = matches!(request.operation, LimitOperation::Take { .. });
        match self.bug() {
            Bug::FullBucketStays if takes => {
                store.write(request.buckets[0].spec.key(), b"a bucket", Expect::Any, None).await?;
            }
            Bug::ClockBackRefills if takes && self.wall_went_back() => {
                store.limit(&LimitRequest { operation: LimitOperation::Reset, ..request.clone() }).await?;
            }
            Bug::TakesTwice if takes => _ = store.limit(request).await?,
            Bug::TakesOneByOne if takes && request.buckets.len() > 1 => {
                let mut refused = None;
                for (i, bucket) in request.buckets.iter().enumerate() {
                    if !store.limit(&one(TAKE, bucket, bucket.tokens)).await?.allowed {
                        refused = refused.or(Some(i));
                    }
                }
                let peek = LimitRequest { operation: LimitOperation::Peek, ..request.clone() };
                return Ok(LimitOutcome { allowed: refused.is_none(), refused, ..store.limit(&peek).await? });
            }
            Bug::WaitsOutOfTurn if takes => return self.take_out_of_turn(request).await,
            Bug::WaitReservesNothing if takes => {
                let outcome = store.limit(&LimitRequest { operation: TAKE, ..request.clone() }).await?;
                return Ok(match request.operation {
                    LimitOperation::Take { wait } if outcome.retry_after() <= wait => {
                        LimitOutcome { allowed: true, wait: outcome.retry_after(), refused: None, ..outcome }
                    }
                    _ => outcome,
                });
            }
            _ => {}
        }
        let outcome = store.limit(&twisted).await?;
        if takes && !outcome.allowed {
            match self.bug() {
                Bug::LimitNeverRefuses => {
                    return Ok(LimitOutcome { allowed: true, refused: None, ..outcome });
                }
                Bug::RefusedTakeTakes if outcome.remaining() > 0 => {
                    store.limit(&one(TAKE, &request.buckets[0], outcome.remaining())).await?;
                }
                _ => {}
            }
        }
        Ok(outcome)
    }
}

/// No bug is planted in the examination.
#[async_trait]
impl Examine for Bugged {
    async fn examine(&self) -> Result<Examination> {
        self.store().examine().await
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        self.store().read_clocks().await
    }
}
