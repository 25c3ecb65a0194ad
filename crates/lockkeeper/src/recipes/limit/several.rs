//! Several limits in one step: all or nothing.

use std::time::Duration;

use lockkeeper_core::Result;
use lockkeeper_core::limit::{LimitBucket, LimitOperation, LimitRequest};
use lockkeeper_host::sleep_until;

use super::{LimitStatus, RateLimit, TakeOutcome, send};
use crate::keeper::Lockkeeper;

/// Several rate limits that are asked in one step, such as one per user and one per tenant. Made by
/// [`Lockkeeper::limits`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// use lockkeeper::limit::{PER_MINUTE, PER_SECOND};
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let both = keeper.limits([
///     keeper.limit("user/alice").rate(1, PER_MINUTE),
///     keeper.limit("tenant/acme").rate(100, PER_SECOND),
/// ]);
/// assert!(both.take(1).await?.allowed());
/// assert_eq!(both.take(1).await?.refused(), Some("user/alice"));     // and the tenant's bucket lost nothing
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing happens before take()"]
#[derive(Clone, Debug)]
pub struct RateLimits {
    keeper: Lockkeeper,
    limits: Vec<RateLimit>,
}

impl RateLimits {
    pub(super) fn new(keeper: Lockkeeper, limits: Vec<RateLimit>) -> Self {
        RateLimits { keeper, limits }
    }

    async fn send(&self, operation: LimitOperation, tokens: u64) -> Result<TakeOutcome> {
        let buckets: Result<Vec<LimitBucket>> =
            self.limits.iter().map(|limit| limit.bucket(tokens)).collect();
        let keys = self.limits.iter().map(|limit| limit.key().to_owned()).collect();
        send(&self.keeper, LimitRequest { operation, buckets: buckets? }, keys, tokens).await
    }

    /// Takes `n` tokens of every limit, or none of any: [`TakeOutcome::refused`] names the limit that refused.
    pub async fn take(&self, n: u64) -> Result<TakeOutcome> {
        self.send(LimitOperation::Take { wait: Duration::ZERO }, n).await
    }

    /// Takes one token of every limit, and waits for up to `up_to`.
    ///
    /// It retries at the time that the refusing limit names. It reserves no place, because a place in a slow bucket would hold up all
    /// users of the fast one; so callers are served in no order.
    pub async fn wait(&self, up_to: Duration) -> Result<TakeOutcome> {
        let clock = &*self.keeper.0.clock;
        let until = clock.now() + up_to;
        loop {
            let outcome = self.take(1).await?;
            let next = clock.now() + outcome.retry_after();
            if outcome.allowed() || next > until {
                return Ok(outcome);
            }
            sleep_until(clock, next).await;
        }
    }

    /// The state of each limit. Takes nothing.
    pub async fn peek(&self) -> Result<Vec<LimitStatus>> {
        let statuses = self.send(LimitOperation::Peek, 1).await?.statuses();
        Ok(statuses
            .into_iter()
            .map(|status| LimitStatus { allowed: status.remaining > 0, ..status })
            .collect())
    }
}
