//! A client's request for one or more buckets.

use std::collections::HashSet;
use std::time::Duration;

use crate::limit::{BucketSpec, LimitOutcome};
use crate::{Error, Result, limits};

/// One bucket of a request, and how many tokens the request is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitBucket {
    /// The bucket.
    pub spec: BucketSpec,
    /// The tokens: 1 to the burst.
    pub tokens: u64,
    /// For a refund: the instant at which the bucket would have been full right after the take, as
    /// [`crate::limit::BucketState::full_at`] said. Unused by the other operations.
    pub taken: u64,
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitOperation {
    /// Takes the tokens of all buckets, or of none.
    Take {
        /// How long the caller would wait for them. If the tokens are there within that time, the store reserves them in the same step, and the
        /// caller uses them only after [`crate::limit::LimitOutcome::wait`]. A request for several buckets cannot wait: its place in one of them
        /// would hold up the other users of all of them.
        wait: Duration,
    },
    /// Changes nothing, and answers as a take without a wait would.
    Peek,
    /// Fills the buckets.
    Reset,
    /// Gives tokens back that the caller has taken and has not used. Only the last take of a bucket brings tokens back, without those that have
    /// refilled since; a bucket from which another caller has taken meanwhile stays as it is.
    Refund,
}

/// A request for one or more buckets, which a store carries out in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitRequest {
    /// Its operation.
    pub operation: LimitOperation,
    /// The buckets, each once.
    pub buckets: Vec<LimitBucket>,
}

impl LimitRequest {
    /// The request that gives all tokens of this take back. `outcome` is the answer to the take.
    pub fn refund(&self, outcome: &LimitOutcome) -> LimitRequest {
        let mut buckets = self.buckets.clone();
        for (bucket, state) in buckets.iter_mut().zip(&outcome.buckets) {
            bucket.taken = state.full_at;
        }
        LimitRequest { operation: LimitOperation::Refund, buckets }
    }

    /// Checks the request. Every store calls this before it sends anything.
    pub fn check(&self) -> Result<()> {
        let count = self.buckets.len();
        if count == 0 || count > limits::BUCKETS {
            return Err(Error::invalid(format!(
                "a request may have 1 to {} limits, this one has {count}",
                limits::BUCKETS
            )));
        }
        let mut keys = HashSet::new();
        for LimitBucket { spec, tokens, .. } in &self.buckets {
            let (key, burst) = (spec.key(), spec.burst());
            if !keys.insert(key) {
                return Err(Error::invalid(format!("the limit {key} stands twice in one request")));
            }
            if *tokens == 0 {
                return Err(Error::invalid("0 tokens: take or give back at least 1"));
            }
            if *tokens > burst {
                return Err(Error::invalid(format!(
                    "{tokens} tokens are more than the burst of {burst}: no take of them would ever be allowed. Raise the \
                     burst, or take fewer"
                )));
            }
        }
        match self.operation {
            LimitOperation::Take { wait } if wait > limits::TTL_MAX => {
                Err(Error::invalid("a take waits for a day at most"))
            }
            LimitOperation::Take { wait } if count > 1 && !wait.is_zero() => Err(Error::Unsupported(
                "a request for several limits reserves no place: take without a wait, and retry after the time in the answer".into(),
            )),
            _ => Ok(()),
        }
    }
}
