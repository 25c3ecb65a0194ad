//! Concurrency and rate together: a permit and a token.

use std::time::Duration;

use lockkeeper_core::{Busy, ReleaseOutcome, Result};

use super::{RateLimit, TakeOutcome};
use crate::guard::Guard;

/// A limit of how often work may begin and of how much of it may run at the same time. Made by [`RateLimit::permits`].
///
/// ```
/// # async fn call_the_api() {}
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// use lockkeeper::limit::{EnterOutcome, PER_SECOND};
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let limit = keeper.limit("api.example.com").rate(10, PER_SECOND).permits(3);
/// if let EnterOutcome::Entered(pass) = limit.enter().await? {
///     pass.guard().run(call_the_api()).await?;           // ended before the deadline if the permit is lost
///     pass.release().await?;
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing happens before enter()"]
#[derive(Clone, Debug)]
pub struct WorkLimit {
    limit: RateLimit,
    permits: u32,
    ttl: Duration,
}

/// The answer to [`WorkLimit::enter`].
#[must_use = "the work may have been refused"]
#[derive(Debug)]
pub enum EnterOutcome {
    /// The work may begin.
    Entered(Box<LimitPass>),
    /// All permits are held. No token was taken.
    NoPermit(Box<Busy>),
    /// The rate is used up. No permit is held.
    NoToken(Box<TakeOutcome>),
}

/// A permit and a token. Dropping it releases the permit in the background; the token is used.
#[derive(Debug)]
pub struct LimitPass {
    guard: Guard,
    taken: TakeOutcome,
}

impl WorkLimit {
    pub(super) fn new(limit: RateLimit, permits: u32) -> Self {
        WorkLimit { limit, permits, ttl: Duration::from_secs(30) }
    }

    /// How long the store waits for a renewal of the permit before another process gets it: 100 ms to 24 h, 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Takes a permit and then a token, or neither. It does not wait.
    ///
    /// The permit comes first, because it can be given back without a loss. If the token is refused, or its fate is unknown, the permit is
    /// released before the call returns. Dropping the future releases the permit in the background.
    pub async fn enter(&self) -> Result<EnterOutcome> {
        let name = self.limit.bucket(1)?.spec.key().clone();
        let permit = self.limit.keeper().lock(name).permits(self.permits).ttl(self.ttl);
        let guard = match permit.acquire_at_once().await? {
            Ok(guard) => guard,
            Err(busy) => return Ok(EnterOutcome::NoPermit(Box::new(busy))),
        };
        let taken = self.limit.take(1).await;
        match taken {
            Ok(taken) if taken.allowed() => Ok(EnterOutcome::Entered(Box::new(LimitPass { guard, taken }))),
            refused => {
                // If the release fails, the ttl ends the permit.
                let _ = guard.release().await;
                refused.map(|taken| EnterOutcome::NoToken(Box::new(taken)))
            }
        }
    }
}

impl LimitPass {
    /// The permit: whether it is still held, and its fence (the fencing token).
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// The state of the bucket when the token was taken.
    pub fn taken(&self) -> &TakeOutcome {
        &self.taken
    }

    /// The work is done: releases the permit.
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.guard.release().await
    }

    /// The work was not begun: releases the permit, and gives the token back if no other caller has taken one since, as
    /// [`TakeOutcome::refund`] does.
    pub async fn cancel(mut self) -> Result<ReleaseOutcome> {
        let refunded = self.taken.refund(1).await;
        let released = self.guard.release().await?;
        refunded.map(|()| released)
    }
}
