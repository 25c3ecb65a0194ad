//! Rate limits: how often the processes of a fleet may do something together. [`Lockkeeper::limit`].
//!
//! A limit is a token bucket in the store. The store decides in one step by its own clock, so the limit is exact however many processes share
//! it. [`LimitSupport`](crate::LimitSupport) describes the stores without such a step.

mod outcome;
mod permits;
mod prefetch;
mod reserved;
mod several;

use std::time::Duration;

use lockkeeper_core::limit::{BucketSpec, LimitBucket, LimitOperation, LimitRequest, Rate};
use lockkeeper_core::{Error, LimitSupport, Result};

pub use self::outcome::{LimitStatus, TakeOutcome};
pub use self::permits::{EnterOutcome, LimitPass, WorkLimit};
pub use self::prefetch::{PrefetchOutcome, PrefetchedLimit};
pub use self::several::RateLimits;
use super::name_of;
use crate::keeper::Lockkeeper;

/// The period of a rate per second.
pub const PER_SECOND: Duration = Duration::from_secs(1);
/// The period of a rate per minute.
pub const PER_MINUTE: Duration = Duration::from_secs(60);
/// The period of a rate per hour.
pub const PER_HOUR: Duration = Duration::from_secs(60 * 60);
/// The period of a rate per day.
pub const PER_DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A rate limit that all processes share.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// use lockkeeper::limit::PER_SECOND;
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let limit = keeper.limit("mail/alice").rate(100, PER_SECOND).burst(200);
/// let mut taken = limit.take(1).await?;
/// assert_eq!((taken.allowed(), taken.remaining()), (true, 199));
/// taken.refund(1).await?;                                // the work was not needed after all
/// # Ok(())
/// # }
/// ```
///
/// In any time t the store gives at most `rate × t + burst` tokens. The bucket is full at first, and a full bucket leaves nothing in
/// the store. Every process must use the same rate and burst for a key: the store keeps neither, and decides by those of the request.
#[must_use = "nothing happens before take()"]
#[derive(Clone, Debug)]
pub struct RateLimit {
    keeper: Lockkeeper,
    key: String,
    rate: Option<(u64, Duration)>,
    burst: Option<u64>,
}

impl Lockkeeper {
    /// The rate limit called `key`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes. The first call reports an invalid key, and a missing
    /// [rate](RateLimit::rate).
    pub fn limit(&self, key: impl Into<String>) -> RateLimit {
        RateLimit { keeper: self.clone(), key: key.into(), rate: None, burst: None }
    }

    /// Several rate limits in one step, such as one per user and one per tenant: all or nothing.
    pub fn limits(&self, limits: impl IntoIterator<Item = RateLimit>) -> RateLimits {
        RateLimits::new(self.clone(), limits.into_iter().collect())
    }
}

impl RateLimit {
    /// So many tokens per `period`, for instance `rate(100, PER_SECOND)`. There is no default. At most a million tokens per second.
    pub fn rate(mut self, tokens: u64, period: Duration) -> Self {
        self.rate = Some((tokens, period));
        self
    }

    /// How many tokens the full bucket holds: what may be taken at once after a pause. By default as many as the rate has in one period.
    pub fn burst(mut self, tokens: u64) -> Self {
        self.burst = Some(tokens);
        self
    }

    /// The rate, for the headers of HTTP.
    #[cfg(feature = "tower")]
    pub(crate) fn quota(&self) -> (u64, Duration) {
        self.rate.unwrap_or_default()
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }

    pub(super) fn keeper(&self) -> &Lockkeeper {
        &self.keeper
    }

    pub(super) fn bucket(&self, tokens: u64) -> Result<LimitBucket> {
        let key = name_of("limit/", &self.key)?;
        let (rate, period) =
            self.rate.ok_or_else(|| Error::invalid("the limit has no rate: call rate(tokens, period)"))?;
        let spec = BucketSpec::new(key, Rate::new(rate, period)?, self.burst.unwrap_or(rate))?;
        Ok(LimitBucket { spec, tokens, taken: 0 })
    }

    async fn send(&self, operation: LimitOperation, tokens: u64) -> Result<TakeOutcome> {
        let request = LimitRequest { operation, buckets: vec![self.bucket(tokens)?] };
        send(&self.keeper, request, vec![self.key.clone()], tokens).await
    }

    /// Takes `n` tokens, or none: [`TakeOutcome::allowed`] says which. More tokens than the burst are [`Error::Invalid`].
    ///
    /// [`Error::Unknown`]: the tokens may have been taken; a retry may take them a second time, which is safe for the limit. Dropping the future
    /// may lose the tokens too.
    pub async fn take(&self, n: u64) -> Result<TakeOutcome> {
        self.send(LimitOperation::Take { wait: Duration::ZERO }, n).await
    }

    /// Takes one token, and waits for it for up to `up_to`: see [`RateLimit::wait_for`].
    pub async fn wait(&self, up_to: Duration) -> Result<TakeOutcome> {
        self.wait_for(1, up_to).await
    }

    /// Takes `n` tokens, and waits for them for up to `up_to`, a day at most.
    ///
    /// The store reserves the tokens in the same step, if they will be there in time, and the call returns when they are. So callers take their
    /// turns in the order of their requests, and no caller waits in vain: one that cannot have its tokens within `up_to` is refused at once.
    ///
    /// Dropping the future before its turn gives the place back, in the background, if no other caller has taken tokens or a place since. Otherwise
    /// the tokens of that place are lost: to move the others up could let two of them through at one instant.
    pub async fn wait_for(&self, n: u64, up_to: Duration) -> Result<TakeOutcome> {
        let operation = LimitOperation::Take { wait: up_to };
        let request = LimitRequest { operation, buckets: vec![self.bucket(n)?] };
        check(&self.keeper, &request)?;
        let outcome = reserved::reserve(&self.keeper, request, self.key.clone()).await?;
        reserved::sleep_until_usable(outcome).await
    }

    /// The state of the bucket. Takes nothing.
    pub async fn peek(&self) -> Result<LimitStatus> {
        let outcome = self.send(LimitOperation::Peek, 1).await?;
        Ok(LimitStatus { allowed: outcome.allowed(), ..outcome.statuses().remove(0) })
    }

    /// Fills the bucket.
    pub async fn reset(&self) -> Result<()> {
        self.send(LimitOperation::Reset, 1).await.map(drop)
    }

    /// Takes tokens in batches of `batch` and decides in this process, for a key that is too hot for one shard of the store: see
    /// [`PrefetchedLimit`]. Approximate.
    pub fn prefetch(self, batch: u64) -> PrefetchedLimit {
        PrefetchedLimit::new(self, batch)
    }

    /// Limits how many work at the same time as well: see [`WorkLimit`].
    pub fn permits(self, n: u32) -> WorkLimit {
        WorkLimit::new(self, n)
    }
}

/// Sends a request to the store, unless the store has no rate limits.
async fn send(
    keeper: &Lockkeeper,
    request: LimitRequest,
    keys: Vec<String>,
    tokens: u64,
) -> Result<TakeOutcome> {
    check(keeper, &request)?;
    let outcome = keeper.0.store.limit(&request).await?;
    Ok(TakeOutcome::new(keeper.clone(), request, outcome, keys, tokens))
}

/// Checks the request, and that the store has rate limits.
fn check(keeper: &Lockkeeper, request: &LimitRequest) -> Result<()> {
    request.check()?;
    let profile = keeper.profile();
    if profile.limits == LimitSupport::No {
        return Err(Error::Unsupported(format!(
            "the {} store has no rate limits: use sqlite:PATH on one host, redis://HOST or postgres://HOST/DATABASE for a fleet",
            profile.store
        )));
    }
    Ok(())
}
