//! One leader among many: a lock whose fence is the term, and a record in which the leader says what others should know.

mod leader;
mod page;

use std::time::Duration;

use futures_util::stream::BoxStream;
use lockkeeper_core::{Attempt, Error, Result};

use super::backoff::{endless, look_again};
use super::cell::Cell;
use super::{name_of, need_records};
use crate::keeper::Lockkeeper;
pub use leader::Leader;
use page::Page;
pub use page::Proclamation;

/// An election by name. Nothing happens before [`Election::campaign`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// # async fn schedule(_: lockkeeper::Fence) {}
/// let election = keeper.election("scheduler");
/// let leader = election.campaign("10.0.0.7:4000").await?;      // waits in line
/// assert_eq!(election.leader().await?.unwrap().value.as_deref(), Some("10.0.0.7:4000"));
/// leader.guard().run(schedule(leader.term())).await?;          // ended before the deadline if the term is lost
/// leader.resign().await?;
/// # Ok(())
/// # }
/// ```
///
/// The term is a fence: it grows from leader to leader. A leader that was paused may believe for a moment longer than it
/// should, as with every lock; what it writes with its term is refused by whoever has seen a newer one.
#[must_use = "nothing happens before campaign()"]
#[derive(Clone, Debug)]
pub struct Election {
    keeper: Lockkeeper,
    name: String,
    ttl: Duration,
    poll: Duration,
    attempt: Option<Attempt>,
    label: Option<String>,
    for_correctness: bool,
}

impl Lockkeeper {
    /// The election called `name`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes. A bad name is told by the first
    /// call.
    pub fn election(&self, name: impl Into<String>) -> Election {
        Election {
            keeper: self.clone(),
            name: name.into(),
            ttl: Duration::from_secs(30),
            poll: Duration::from_millis(500),
            attempt: None,
            label: None,
            for_correctness: false,
        }
    }
}

impl Election {
    /// How long a leader's silence may last before another is elected: 100 ms to 24 h, 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How often [`Election::observe`] looks. Every 500 ms by default, give or take a quarter.
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Campaigns with this attempt: a process that kept it, and starts again within its lease, goes on with the same term.
    ///
    /// It is the proof of leadership. Keep it secret, write it down *before* the campaign, use it in one process at a time,
    /// and in each process for one campaign: what the end of one campaign gives back would be the other's.
    pub fn resume(mut self, attempt: Attempt) -> Self {
        self.attempt = Some(attempt);
        self
    }

    /// What people see in lists beside the host and the pid.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Refuses a store that can forget a leader or let a term go back.
    pub fn for_correctness(mut self) -> Self {
        self.for_correctness = true;
        self
    }

    fn cell(&self) -> Result<Cell> {
        need_records(&self.keeper, "an election")?;
        Ok(Cell::new(&self.keeper, name_of("election/", &self.name)?))
    }

    /// Stands in line until elected, and proclaims `value`, which has at most 8 KiB.
    ///
    /// Dropping the future leaves the line, and gives back what was won meanwhile. If the proclamation fails the term is
    /// given back: a leader nobody knows of helps nobody.
    pub async fn campaign(&self, value: impl Into<String>) -> Result<Leader> {
        let (cell, value) = (self.cell()?, value.into());
        page::check(&value)?;
        let mut ask = self.keeper.lock(&cell.key).ttl(self.ttl);
        if let Some(attempt) = self.attempt {
            ask = ask.attempt(attempt);
        }
        if let Some(label) = &self.label {
            ask = ask.label(label);
        }
        if self.for_correctness {
            ask = ask.for_correctness();
        }
        let leader = Leader { cell, name: self.name.clone(), guard: ask.acquire().await? };
        match leader.begin(value).await {
            Ok(()) => Ok(leader),
            Err(error) => {
                // Not left to the background: who campaigns again at once must not meet its own shadow.
                let _ = leader.guard.release().await;
                Err(error)
            }
        }
    }

    /// The newest proclamation of the leader, if there is one now: its term holds the lock.
    pub async fn leader(&self) -> Result<Option<Proclamation>> {
        let cell = self.cell()?;
        let newest = match cell.read().await? {
            Some(seen) => Page::parse(&self.name, &seen.value)?.newest().cloned(),
            None => None,
        };
        let Some(newest) = newest.filter(|newest| newest.value.is_some()) else { return Ok(None) };
        let held = self.keeper.0.store.inspect(&cell.key).await?;
        let leads = held.is_some_and(|view| view.held.iter().any(|held| held.fence == newest.term));
        Ok(leads.then_some(newest))
    }

    /// What the leaders proclaim: first the newest there is, then everything after it, in order, each once. A resignation
    /// is a proclamation without a value. That a leader *died* is not proclaimed: its successor is.
    ///
    /// The last 16 proclamations are kept. Who looks away for longer than these takes has [`Proclamation::missed`] set on the
    /// next one, and goes on from there: it is told that there was a gap, and what is true now.
    ///
    /// An error is an item like others: the stream goes on after it.
    pub fn observe(&self) -> BoxStream<'static, Result<Proclamation>> {
        let state = Observer { election: self.clone(), told: None, waiting: Vec::new(), looked: false };
        Box::pin(endless(state, |mut state| async move { Some((state.next().await, state)) }))
    }
}

struct Observer {
    election: Election,
    /// The newest that was told.
    told: Option<Proclamation>,
    /// What is to be told, the newest first.
    waiting: Vec<Proclamation>,
    looked: bool,
}

impl Observer {
    async fn next(&mut self) -> Result<Proclamation> {
        loop {
            if let Some(next) = self.waiting.pop() {
                self.told = Some(next.clone());
                return Ok(next);
            }
            if std::mem::replace(&mut self.looked, true) {
                look_again(&*self.election.keeper.0.clock, self.election.poll).await;
            }
            let Some(seen) = self.election.cell()?.read().await? else { continue };
            let page = Page::parse(&self.election.name, &seen.value)?;
            self.waiting = page.since(self.told.as_ref());
            self.waiting.reverse();
        }
    }
}

/// A value that is too long is told before anybody campaigns.
pub(crate) fn too_long(len: usize, most: usize) -> Error {
    Error::invalid(format!(
        "the value has {len} bytes, {most} are allowed: proclaim an address, not the thing itself"
    ))
}
