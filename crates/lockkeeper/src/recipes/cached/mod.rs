//! A value that is expensive to compute, kept for a while: one caller in the fleet computes it, and the
//! others get the old value at once, or wait for the new one.

mod early;
mod get;
mod permit;
mod record;
#[cfg(feature = "redis")]
mod redis;
mod start;
mod value_cache;
mod view;

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Error, Fence, Result, limits};

use super::{name_of, need_records};
use crate::keeper::Lockkeeper;
pub use get::CachedError;
pub use permit::RefreshPermit;
#[cfg(feature = "redis")]
pub use redis::RedisCache;
pub use value_cache::{FencedValue, PutOutcome, ValueCache};
use view::CachedRecords;

/// The longest times that are passed on to a store: some count in units that cannot represent longer ones.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The largest part of the ttl that the jitter takes away.
const JITTER_MAX: f64 = 0.5;
/// The largest beta: a caller of one above it would refresh all the time.
const BETA_MAX: f64 = 100.0;

/// A cached value by key. Nothing happens before [`Cached::get`], [`Cached::get_bytes`] or
/// [`Cached::claim`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::time::Duration;
/// # use lockkeeper::cached::ValueState;
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// # async fn report(_: lockkeeper::Fence) -> Result<u64, String> { Ok(4711) }
/// for state in [ValueState::Computed, ValueState::Fresh] {
///     let report = keeper
///         .cached("report/daily")
///         .ttl(Duration::from_secs(300))                 // fresh for five minutes
///         .stale_while(Duration::from_secs(3600))        // after that: the old one, while one caller computes
///         .get(report)
///         .await?;
///     assert_eq!((report.value, report.state), (4711, state));
/// }
/// # Ok(())
/// # }
/// ```
///
/// The clock of the store decides whether a value is fresh, and how long an old one is kept: wall clocks of
/// callers that differ change neither. A caller whose lease ended while it computed cannot replace a value
/// that has a newer fence (fencing token).
#[must_use = "nothing happens before get(), get_bytes() or claim()"]
#[derive(Clone, Debug)]
pub struct Cached {
    keeper: Lockkeeper,
    key: String,
    ttl: Duration,
    stale: Duration,
    wait: Option<Duration>,
    lease: Duration,
    beta: f64,
    jitter: f64,
    back_off: Duration,
    negative: Option<Duration>,
    poll: Duration,
    cache: Option<Arc<dyn ValueCache>>,
}

/// A value, found or computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedValue<T> {
    /// The value.
    pub value: T,
    /// The fence of the caller that computed it.
    pub fence: Fence,
    /// Where it comes from.
    pub state: ValueState,
    /// Why a refresh failed, if this value is given in spite of that.
    pub refresh_error: Option<String>,
    /// Why the value that this caller computed is not in the cache, if it is not.
    pub not_stored: Option<String>,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueState {
    /// It was found, and is fresh.
    Fresh,
    /// It was found, its ttl is over, and it may be used for a while longer.
    Stale,
    /// This caller computed it.
    Computed,
}

/// A refresh that failed a short time ago. No caller tries again before its back-off is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedRefresh {
    /// The error of the refresher.
    pub error: String,
    /// The fence of the refresher.
    pub fence: Fence,
}

/// The answer of [`Cached::claim`].
#[derive(Debug)]
pub enum CachedStart {
    /// There is a value.
    Value(CachedValue<Vec<u8>>),
    /// The caller has to compute the value.
    Refresh(Box<RefreshPermit>),
    /// There is no value, a refresh has just failed, and the caller is not to wait for the next one.
    Failed(FailedRefresh),
}

impl Lockkeeper {
    /// The value that is cached under `key`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes. The
    /// first call reports an invalid key.
    pub fn cached(&self, key: impl Into<String>) -> Cached {
        Cached {
            keeper: self.clone(),
            key: key.into(),
            ttl: Duration::from_secs(60),
            stale: Duration::ZERO,
            wait: None,
            lease: Duration::from_secs(30),
            beta: 1.0,
            jitter: 0.1,
            back_off: Duration::from_secs(5),
            negative: None,
            poll: Duration::from_millis(500),
            cache: None,
        }
    }
}

impl Cached {
    /// How long a value is fresh after it was stored: at least 100 ms, 60 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl.min(LONGEST);
        self
    }

    /// How long after its ttl the old value is kept, to be given while one caller computes the new one, and
    /// after a refresh that failed. Zero by default: then a value whose ttl is over is as good as none.
    ///
    /// The caller that stores a value decides how long the store keeps it, so all callers of a key should
    /// say the same.
    pub fn stale_while(mut self, stale: Duration) -> Self {
        self.stale = stale.min(LONGEST);
        self
    }

    /// How long to wait for the value that another caller computes. After that a caller gets the old value
    /// if there is one, else [`Error::Busy`].
    ///
    /// By default a caller gets an old value at once, and waits without a limit if there is none.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// How long the store waits for a renewal of the caller that computes, before another caller takes
    /// over: 100 ms to 24 h, 30 s by default.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How early callers refresh a value that is still fresh, so that it need not end first: 0 to 100, 1 by
    /// default; 0 means never. The longer a value takes to compute, and the closer its end is, the more
    /// likely a caller does it (XFetch: <https://cseweb.ucsd.edu/~avattani/papers/cache_stampede.pdf>).
    pub fn early_refresh(mut self, beta: f64) -> Self {
        self.beta = beta;
        self
    }

    /// The part of the ttl, at most, by which the ttl of a value is shortened at random: 0 to 0.5, 0.1 by
    /// default. So values that were stored together do not end together.
    pub fn jitter(mut self, part: f64) -> Self {
        self.jitter = part;
        self
    }

    /// How long no caller tries again after a refresh that failed: at least 100 ms, 5 s by default.
    pub fn back_off(mut self, back_off: Duration) -> Self {
        self.back_off = back_off.min(LONGEST);
        self
    }

    /// If there is no value, a refresh that failed is the answer to all callers for this long, at least
    /// 100 ms: they get its error at once. By default they wait until the back-off is over, and one of them
    /// tries again.
    pub fn negative(mut self, ttl: Duration) -> Self {
        self.negative = Some(ttl.min(LONGEST));
        self
    }

    /// How often a waiting caller polls for the value, beside its place in the queue. Every 500 ms by
    /// default.
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Keeps values in `cache` and not in the store's records. All callers of a key need the same.
    pub fn in_cache(mut self, cache: Arc<dyn ValueCache>) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Checks the key, the times and the store, before anything is read or written.
    fn check(&self) -> Result<CachedRecords> {
        need_records(&self.keeper, "a cached value")?;
        let times =
            [("ttl", Some(self.ttl)), ("back-off", Some(self.back_off)), ("negative ttl", self.negative)];
        for (what, time) in times {
            if let Some(time) = time.filter(|time| *time < limits::TTL_MIN) {
                return Err(Error::invalid(format!("the {what} is {time:?}: at least 100ms are needed")));
            }
        }
        if self.lease < limits::TTL_MIN || self.lease > limits::TTL_MAX {
            let lease = self.lease;
            return Err(Error::invalid(format!("the lease is {lease:?}: 100ms to 24h are possible")));
        }
        for (what, number, most) in [("beta", self.beta, BETA_MAX), ("jitter", self.jitter, JITTER_MAX)] {
            if !(0.0..=most).contains(&number) {
                return Err(Error::invalid(format!("the {what} is {number}: 0 to {most} are possible")));
            }
        }
        CachedRecords::new(self, name_of("cached/", &self.key)?)
    }
}
