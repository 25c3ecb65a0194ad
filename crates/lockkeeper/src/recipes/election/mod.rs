//! One leader among many processes: a lock whose fence is the term, and a record in which the leader
//! publishes a value.

mod leader;
mod record;

use std::time::Duration;

use futures_util::stream::BoxStream;
use lockkeeper_core::{Attempt, Error, Result};

use super::backoff::{pause_between_polls, unfold_forever};
use super::cas_record::CasRecord;
use super::{name_of, need_records};
use crate::keeper::Lockkeeper;
pub use leader::Leader;
use record::ElectionRecord;
pub use record::Proclamation;

/// An election by name. Nothing happens before [`Election::campaign`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// # async fn schedule(_: lockkeeper::Fence) {}
/// let election = keeper.election("scheduler");
/// let leader = election.campaign("10.0.0.7:4000").await?;      // waits in the queue
/// assert_eq!(election.leader().await?.unwrap().value.as_deref(), Some("10.0.0.7:4000"));
/// leader.guard().run(schedule(leader.term())).await?;          // ended before the deadline if the term is lost
/// leader.resign().await?;
/// # Ok(())
/// # }
/// ```
///
/// The term is a fence (a fencing token): it grows from leader to leader. A paused leader may act for
/// longer than it should, as with every lock; a resource that has seen a newer term refuses its writes.
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
    /// The election called `name`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes. The first call
    /// reports an invalid name.
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
    /// How long the store waits for a renewal of the leader before another candidate is elected: 100 ms to
    /// 24 h, 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How often [`Election::observe`] polls. Every 500 ms by default, give or take a quarter.
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Campaigns with this attempt: a process that stored it, and starts again within its lease, continues
    /// the same term.
    ///
    /// The attempt is the proof of leadership. Keep it secret, store it *before* the campaign, use it in
    /// one process at a time, and in each process for one campaign: the end of one campaign would release
    /// the other's term.
    pub fn resume(mut self, attempt: Attempt) -> Self {
        self.attempt = Some(attempt);
        self
    }

    /// The label that `list` and `inspect` show beside the host and the pid. By default the name of the process, as
    /// `ps` shows it.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Refuses a store that can forget a leader or repeat a term.
    pub fn for_correctness(mut self) -> Self {
        self.for_correctness = true;
        self
    }

    fn cas_record(&self) -> Result<CasRecord> {
        need_records(&self.keeper, "an election")?;
        Ok(CasRecord::new(&self.keeper, name_of("election/", &self.name)?))
    }

    /// Waits in the queue until elected, and proclaims `value`, which has at most 8 KiB.
    ///
    /// Dropping the future leaves the queue and releases what was granted meanwhile. If the proclamation
    /// fails, the term is released: a leader that no observer can find is of no use.
    pub async fn campaign(&self, value: impl Into<String>) -> Result<Leader> {
        let (cas_record, value) = (self.cas_record()?, value.into());
        record::check(&value)?;
        let mut request = self.keeper.lock(&cas_record.key).ttl(self.ttl);
        if let Some(attempt) = self.attempt {
            request = request.attempt(attempt);
        }
        if let Some(label) = &self.label {
            request = request.label(label);
        }
        if self.for_correctness {
            request = request.for_correctness();
        }
        let leader = Leader { cas_record, name: self.name.clone(), guard: request.acquire().await? };
        match leader.publish_first(value).await {
            Ok(()) => Ok(leader),
            Err(error) => {
                // Release now and not in the background: a candidate that campaigns again at once must not
                // wait for itself.
                let _ = leader.guard.release().await;
                Err(error)
            }
        }
    }

    /// The newest proclamation of the current leader. `None` if its term does not hold the lock.
    pub async fn leader(&self) -> Result<Option<Proclamation>> {
        let cas_record = self.cas_record()?;
        let newest = match cas_record.read().await? {
            Some(snapshot) => ElectionRecord::parse(&self.name, &snapshot.value)?.newest().cloned(),
            None => None,
        };
        let Some(newest) = newest.filter(|newest| newest.value.is_some()) else { return Ok(None) };
        let held = self.keeper.0.store.inspect(&cas_record.key).await?;
        let leads = held.is_some_and(|view| view.held.iter().any(|held| held.fence == newest.term));
        Ok(leads.then_some(newest))
    }

    /// A stream of proclamations: first the newest, then all later ones in order, each once. A resignation
    /// is a proclamation without a value. The death of a leader is not proclaimed; its successor's first
    /// proclamation follows.
    ///
    /// The record holds the last 16 proclamations. An observer that misses more finds
    /// [`Proclamation::missed`] set on the next one, and continues from there.
    ///
    /// An error is an item of the stream; the stream goes on after it.
    pub fn observe(&self) -> BoxStream<'static, Result<Proclamation>> {
        let state = Observer { election: self.clone(), reported: None, pending: Vec::new(), polled: false };
        Box::pin(unfold_forever(state, |mut state| async move { Some((state.next().await, state)) }))
    }
}

struct Observer {
    election: Election,
    /// The newest proclamation that was yielded.
    reported: Option<Proclamation>,
    /// The proclamations to yield next, the newest first.
    pending: Vec<Proclamation>,
    polled: bool,
}

impl Observer {
    async fn next(&mut self) -> Result<Proclamation> {
        loop {
            if let Some(next) = self.pending.pop() {
                self.reported = Some(next.clone());
                return Ok(next);
            }
            if std::mem::replace(&mut self.polled, true) {
                pause_between_polls(&*self.election.keeper.0.clock, self.election.poll).await;
            }
            let Some(snapshot) = self.election.cas_record()?.read().await? else { continue };
            let record = ElectionRecord::parse(&self.election.name, &snapshot.value)?;
            self.pending = record.since(self.reported.as_ref());
            self.pending.reverse();
        }
    }
}

/// The error for a value that is too long, returned before the candidate joins the queue.
pub(crate) fn too_long(len: usize, most: usize) -> Error {
    Error::invalid(format!(
        "the value has {len} bytes, {most} are allowed: proclaim an address, not the thing itself"
    ))
}
