//! How fast a bucket refills and how much it holds.

use std::fmt;
use std::time::Duration;

use crate::{Error, LockName, Result};

/// A token costs at least a microsecond: the error of rounding its cost up to a nanosecond stays below 0.1 %.
const TOKEN_NANOS_MIN: u64 = 1_000;
/// The longest time in which an empty bucket becomes full. An instant that far away still fits into 63 bits.
const FILL_MAX: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// How fast a bucket refills: so many tokens in so much time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    tokens: u64,
    period: Duration,
}

impl Rate {
    /// `tokens` per `period`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rate of 0, a period of 0, and more than a million tokens per second.
    pub fn new(tokens: u64, period: Duration) -> Result<Self> {
        if tokens == 0 {
            return Err(Error::invalid(
                "the rate is 0: no take would ever be allowed. Give at least 1 token",
            ));
        }
        if period.is_zero() || period > FILL_MAX {
            return Err(Error::invalid("the period of a rate is between 1 ns and 10 years"));
        }
        let rate = Rate { tokens, period };
        if period.as_nanos() < u128::from(tokens) * u128::from(TOKEN_NANOS_MIN) {
            return Err(Error::invalid(format!(
                "{rate} is more than a million tokens per second: take several at a time"
            )));
        }
        Ok(rate)
    }

    /// How many tokens refill in one period.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The period.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// The cost of a token: the time in which one refills, rounded up to a nanosecond, so that the limit is never exceeded.
    pub fn token_nanos(&self) -> u64 {
        let nanos = self.period.as_nanos().div_ceil(u128::from(self.tokens));
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.period.as_nanos() {
            1_000_000_000 => write!(f, "{}/s", self.tokens),
            60_000_000_000 => write!(f, "{}/min", self.tokens),
            3_600_000_000_000 => write!(f, "{}/h", self.tokens),
            86_400_000_000_000 => write!(f, "{}/d", self.tokens),
            _ => write!(f, "{}/{:?}", self.tokens, self.period),
        }
    }
}

/// One bucket: its key, the cost of a token, and how many tokens it holds when it is full. Checked when it is made.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BucketSpec {
    key: LockName,
    token_nanos: u64,
    burst: u64,
}

impl BucketSpec {
    /// A bucket that refills at `rate` and holds `burst` tokens.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a burst of 0, and for a bucket that would need more than ten years to become full.
    pub fn new(key: LockName, rate: Rate, burst: u64) -> Result<Self> {
        if burst == 0 {
            return Err(Error::invalid(
                "the burst is 0: no take would ever be allowed. Give at least 1 token",
            ));
        }
        let token_nanos = rate.token_nanos();
        let fill = u128::from(token_nanos) * u128::from(burst);
        if fill > FILL_MAX.as_nanos() {
            return Err(Error::invalid(format!(
                "a bucket of {burst} tokens at {rate} would need more than ten years to become full: lower the burst"
            )));
        }
        Ok(BucketSpec { key, token_nanos, burst })
    }

    /// Which bucket it is.
    pub fn key(&self) -> &LockName {
        &self.key
    }

    /// The cost of a token, in nanoseconds.
    pub fn token_nanos(&self) -> u64 {
        self.token_nanos
    }

    /// How many tokens a full bucket holds.
    pub fn burst(&self) -> u64 {
        self.burst
    }

    /// The cost of `tokens`. More tokens than the burst count as the burst.
    pub fn cost_nanos(&self, tokens: u64) -> u64 {
        self.token_nanos * tokens.min(self.burst)
    }

    /// How long an empty bucket needs to become full.
    pub fn fill_nanos(&self) -> u64 {
        self.token_nanos * self.burst
    }
}
