//! Rate limits in memory, and the `Limits` trait.

use async_trait::async_trait;
use lockkeeper_core::limit::{BucketChange, LimitOutcome, LimitRequest, decide};
use lockkeeper_core::{Limits, Result};

use crate::MemoryStore;

impl MemoryStore {
    /// How many buckets of rate limits are not full. A full one takes no memory.
    pub fn buckets(&self) -> usize {
        self.with_state(|state, now| {
            state.buckets.sweep(now.moment.as_nanos());
            state.buckets.full_at.len()
        })
    }
}

#[async_trait]
impl Limits for MemoryStore {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        request.check()?;
        Ok(self.with_state(|state, now| {
            // The boot-time clock never goes back.
            let (buckets, now) = (&mut state.buckets, now.moment.as_nanos());
            buckets.sweep(now);
            let stored: Vec<Option<u64>> = request
                .buckets
                .iter()
                .map(|bucket| buckets.full_at.get(bucket.spec.key()).copied())
                .collect();
            let (outcome, changes) = decide(request, now, &stored);
            for (bucket, change) in request.buckets.iter().zip(changes) {
                match change {
                    BucketChange::Keep => {}
                    BucketChange::Set(at) => buckets.set(bucket.spec.key(), at),
                    BucketChange::Remove => buckets.remove(bucket.spec.key()),
                }
            }
            outcome
        }))
    }
}
