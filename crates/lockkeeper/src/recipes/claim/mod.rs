//! Work that many workers share without a lock per item: each item of a list is claimed by one of them at a time.

mod admin;
mod item;
mod lease;
mod names;
mod record;
mod source;

use std::collections::HashSet;
use std::time::Duration;

use lockkeeper_core::{Error, Purpose, Result, limits};

use super::need_records;
use crate::keeper::Lockkeeper;
pub use admin::{ClaimCounts, FailedItem};
pub use item::{AfterFailure, ClaimedItem};
use names::GroupNames;
pub use names::{GROUP_BYTES, ITEM_BYTES};
pub use source::{BATCH_MAX, ClaimSource};

/// The longest time for which done items are recorded.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A group of items, and the rules for its attempts. All workers of a group should use the same rules.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// # async fn send(_: &str, _: lockkeeper::Fence) -> Result<(), String> { Ok(()) }
/// let mut work = keeper.claim("invoices/2026-06")?.from(["4711", "4712", "4713"])?;
/// while let Some(item) = work.next().await? {               // every worker, with the same list
///     match item.run(send(item.id(), item.fence())).await {
///         Ok(Ok(())) => item.complete().await?,             // refused if another worker took over
///         Ok(Err(why)) => drop(item.fail(why).await?),      // tried again later, a few times
///         Err(_) => {}                                      // the lease is lost: another worker has it
///     }
/// }
/// assert_eq!(keeper.claim("invoices/2026-06")?.counts().await?.done, 3);
/// # Ok(())
/// # }
/// ```
///
/// An item is done exactly once in the sense of its record. Its *effects* happen exactly once only if the work sends the
/// fence (the fencing token) to a resource that refuses older ones: a worker that died may have done the work already.
#[derive(Clone, Debug)]
pub struct ClaimGroup {
    keeper: Lockkeeper,
    names: GroupNames,
    lease: Duration,
    max_attempts: u32,
    backoff: (Duration, Duration),
    keep: Duration,
    poll: Duration,
    for_correctness: bool,
}

impl Lockkeeper {
    /// The items of `group`, whose name has 1 to [`GROUP_BYTES`] bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if that cannot be the name of a group.
    pub fn claim(&self, group: impl AsRef<str>) -> Result<ClaimGroup> {
        Ok(ClaimGroup {
            keeper: self.clone(),
            names: GroupNames::new(group.as_ref())?,
            lease: Duration::from_secs(30),
            max_attempts: 5,
            backoff: (Duration::from_secs(1), Duration::from_secs(5 * 60)),
            keep: Duration::from_secs(24 * 60 * 60),
            poll: Duration::from_millis(500),
            for_correctness: false,
        })
    }
}

impl ClaimGroup {
    /// How long the store waits for a worker that is silent before another worker can take the item: 100 ms to 24 h,
    /// 30 s by default.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How many attempts an item has before it has failed for good, 5 by default. An attempt counts when a worker takes
    /// the item, so an item that kills its workers comes to an end as well.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// How long an item waits after its first failed attempt, and at most: the wait doubles with each attempt, and up to
    /// a half of it is random. A second and five minutes by default; zero is no wait.
    #[must_use]
    pub fn backoff(mut self, first: Duration, most: Duration) -> Self {
        self.backoff = (first, most);
        self
    }

    /// How long a done item is recorded, a day by default. A worker whose list still has the item after that takes it as a
    /// new one.
    #[must_use]
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep.min(LONGEST);
        self
    }

    /// How often a worker looks for free items while all are taken. Every 500 ms by default.
    #[must_use]
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Refuses a store that can forget a record.
    #[must_use]
    pub fn for_correctness(mut self) -> Self {
        self.for_correctness = true;
        self
    }

    /// The items with these ids, each of 1 to [`ITEM_BYTES`] bytes, for one worker. An id that is there twice counts once.
    /// Nothing is written before the first item is claimed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an id, a lease or a limit that cannot be; [`Error::Unsupported`] on a store without records.
    pub fn from<I: AsRef<str>>(&self, ids: impl IntoIterator<Item = I>) -> Result<ClaimSource> {
        self.check()?;
        let (mut all, mut seen) = (Vec::new(), HashSet::new());
        for id in ids {
            self.names.state(id.as_ref())?;
            if seen.insert(id.as_ref().to_owned()) {
                all.push(id.as_ref().to_owned());
            }
        }
        Ok(ClaimSource::new(self.clone(), all))
    }

    /// Whether the store, as it is now, may be used for the purpose.
    fn check_purpose(&self) -> Result<()> {
        if self.for_correctness { self.keeper.profile().allows(Purpose::Correctness) } else { Ok(()) }
    }

    /// Checks the rules and the store.
    fn check(&self) -> Result<()> {
        need_records(&self.keeper, "a claim")?;
        self.check_purpose()?;
        if self.lease < limits::TTL_MIN || self.lease > limits::TTL_MAX {
            return Err(Error::invalid(format!("the lease is {:?}: 100ms to 24h are possible", self.lease)));
        }
        if self.max_attempts == 0 {
            return Err(Error::invalid("an item needs at least one attempt"));
        }
        let (first, most) = self.backoff;
        if first > most || most > limits::TTL_MAX {
            return Err(Error::invalid(format!(
                "the back-off begins with {first:?} and ends with {most:?}: it grows, up to 24h at most"
            )));
        }
        if self.keep < limits::TTL_MIN {
            return Err(Error::invalid(format!("done items are kept for {:?}: 100ms at least", self.keep)));
        }
        Ok(())
    }
}
