//! The items of a caller's list, as a worker takes them one after the other.

use std::collections::{HashMap, HashSet, VecDeque};

use futures_util::future::join_all;
use lockkeeper_core::{Error, LockName, Page, Record, Result};
use lockkeeper_host::random_128;
use tokio::sync::Mutex;

use super::ClaimGroup;
use super::item::ClaimedItem;
use super::lease::{ItemLease, keeps_away};
use super::record::{ItemRecord, ItemState};
use crate::recipes::backoff::pause_between_polls;
use crate::recipes::cas_record::{CasRecord, Retry, Snapshot};

/// The most items of one batch.
pub const BATCH_MAX: usize = 1000;
/// How many items of a batch are requested at once.
const AT_ONCE: usize = 16;
/// After so many items that other workers were quicker to take, the source reads the state of all of them again.
const CONFLICTS: usize = 8;
/// How often one call reads an item again that others have changed, and the whole list.
const ROUNDS: usize = 4;
/// Up to so many items are read one by one; for more the source scans the group.
const READ_ONE_BY_ONE: usize = 32;

/// A worker's view of a list of items. Every worker makes its own from the same list, in any order.
#[derive(Debug)]
pub struct ClaimSource {
    group: ClaimGroup,
    /// The items that are neither done nor failed for good, as far as this worker knows.
    open: Vec<String>,
    /// The items that seemed free when the source looked last.
    candidates: VecDeque<Candidate>,
}

#[derive(Debug)]
struct Candidate {
    id: String,
    /// Its record when the source looked last.
    seen: Option<Snapshot>,
}

/// The answer to one claim.
enum ClaimOutcome {
    Claimed(Box<ClaimedItem>),
    /// Another worker has it, or it waits for its next try.
    Taken,
    /// It is done, or has failed for good.
    Settled,
}

impl ClaimSource {
    pub(super) fn new(group: ClaimGroup, mut ids: Vec<String>) -> ClaimSource {
        // Workers that begin at different places seldom meet.
        if !ids.is_empty() {
            let [a, b, c, d, ..] = random_128();
            let start = u32::from_ne_bytes([a, b, c, d]) as usize % ids.len();
            ids.rotate_left(start);
        }
        ClaimSource { group, open: ids, candidates: VecDeque::new() }
    }

    /// How many items are neither done nor failed for good, as far as this worker knows.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Claims the next item, and waits for one if all are taken. `None`: every item is done, or has failed for good.
    ///
    /// It waits also for items that this process has claimed itself. Dropping the future may leave the lease of an item
    /// behind; then the item is free when that lease is over.
    pub async fn next(&mut self) -> Result<Option<ClaimedItem>> {
        Ok(self.take(1).await?.pop())
    }

    /// Claims up to `most` items, 1 to 1000, and waits until there is at least one. Empty: every item is done, or has
    /// failed for good.
    pub async fn take(&mut self, most: usize) -> Result<Vec<ClaimedItem>> {
        loop {
            let claimed = self.try_take(most).await?;
            if !claimed.is_empty() || self.open.is_empty() {
                return Ok(claimed);
            }
            pause_between_polls(&*self.group.keeper.0.clock, self.group.poll).await;
        }
    }

    /// Claims up to `most` items, 1 to 1000, that are free now. Empty: there is none, now or at all; see
    /// [`ClaimSource::open`].
    pub async fn try_take(&mut self, most: usize) -> Result<Vec<ClaimedItem>> {
        if most == 0 || most > BATCH_MAX {
            return Err(Error::invalid(format!("a batch of {most} items: 1 to {BATCH_MAX} are possible")));
        }
        self.group.check_purpose()?;
        let (mut claimed, mut conflicts, mut refreshes) = (Vec::new(), 0, 0);
        while claimed.len() < most {
            if self.candidates.is_empty() || conflicts >= CONFLICTS {
                if refreshes >= ROUNDS || (refreshes > 0 && self.candidates.is_empty()) {
                    break;
                }
                if let Err(error) = self.refresh().await {
                    return keep(claimed, error);
                }
                (refreshes, conflicts) = (refreshes + 1, 0);
                if self.candidates.is_empty() {
                    break;
                }
            }
            let count = (most - claimed.len()).min(AT_ONCE).min(self.candidates.len());
            let batch: Vec<Candidate> = self.candidates.drain(..count).collect();
            let ids: Vec<String> = batch.iter().map(|candidate| candidate.id.clone()).collect();
            let outcomes = join_all(batch.into_iter().map(|candidate| self.group.claim_one(candidate))).await;
            let mut failure = None;
            for (id, outcome) in ids.into_iter().zip(outcomes) {
                match outcome {
                    Ok(ClaimOutcome::Claimed(item)) => claimed.push(*item),
                    Ok(ClaimOutcome::Taken) => conflicts += 1,
                    Ok(ClaimOutcome::Settled) => {
                        conflicts += 1;
                        self.open.retain(|open| *open != id);
                    }
                    Err(error) => failure = Some(error),
                }
            }
            if let Some(error) = failure {
                return keep(claimed, error);
            }
        }
        Ok(claimed)
    }

    /// Reads which items are settled and which are free.
    async fn refresh(&mut self) -> Result<()> {
        let group = &self.group;
        let (mut states, mut taken) = (HashMap::new(), HashSet::new());
        if self.open.len() <= READ_ONE_BY_ONE {
            for chunk in self.open.chunks(AT_ONCE) {
                for (id, read) in chunk.iter().zip(join_all(chunk.iter().map(|id| group.read_item(id))).await)
                {
                    let (state, is_taken) = read?;
                    states.extend(state.map(|state| (id.clone(), state)));
                    taken.extend(is_taken.then(|| id.clone()));
                }
            }
        } else {
            taken = group.leased().await?;
            for record in group.scan(&group.names.states).await? {
                let id = record.key.as_str().strip_prefix(&group.names.states).map(str::to_owned);
                if let Some(id) = id {
                    states.insert(id, Snapshot::of(record)?);
                }
            }
            states.retain(|_, snapshot| !snapshot.gone);
        }
        let (mut open, mut candidates) = (Vec::new(), VecDeque::new());
        for id in std::mem::take(&mut self.open) {
            let seen = states.remove(&id);
            let record = seen.as_ref().map(|snapshot| ItemRecord::parse(&id, snapshot)).transpose();
            // A record that cannot be read is reported when the item is claimed, and the list stays whole.
            if record.is_ok_and(|record| record.is_some_and(|record| record.is_settled())) {
                continue;
            }
            if !taken.contains(&id) {
                candidates.push_back(Candidate { id: id.clone(), seen });
            }
            open.push(id);
        }
        (self.open, self.candidates) = (open, candidates);
        Ok(())
    }
}

/// An item that was claimed before an error is not lost: the next call meets the error again.
fn keep(claimed: Vec<ClaimedItem>, error: Error) -> Result<Vec<ClaimedItem>> {
    if claimed.is_empty() {
        return Err(error);
    }
    tracing::warn!(%error, "a batch was cut short");
    Ok(claimed)
}

impl ClaimGroup {
    pub(super) fn state_record(&self, id: &str) -> Result<CasRecord> {
        Ok(CasRecord::new(&self.keeper, self.names.state(id)?))
    }

    /// The state of an item, and whether it has a lease.
    async fn read_item(&self, id: &str) -> Result<(Option<Snapshot>, bool)> {
        let (state, lease) = (self.state_record(id)?, self.names.lease(id)?);
        let (state, taken) = tokio::join!(state.read(), ItemLease::exists(&self.keeper, &lease));
        Ok((state?, taken?))
    }

    /// The items that a lease keeps from workers.
    pub(super) async fn leased(&self) -> Result<HashSet<String>> {
        let mut leased = HashSet::new();
        for record in self.scan(&self.names.leases).await? {
            if keeps_away(&self.keeper, &record) {
                leased.extend(record.key.as_str().strip_prefix(&self.names.leases).map(str::to_owned));
            }
        }
        Ok(leased)
    }

    /// All records whose names begin with `prefix`.
    pub(super) async fn scan(&self, prefix: &str) -> Result<Vec<Record>> {
        let (mut all, mut after) = (Vec::new(), None::<LockName>);
        loop {
            let page = Page { after, ..Page::FIRST };
            let found = self.keeper.0.store.scan(prefix, &page).await?;
            all.extend(found.records);
            after = found.next;
            if after.is_none() {
                return Ok(all);
            }
        }
    }

    /// Takes the lease, then writes the attempt into the state record. Only that write decides: a worker that was paused
    /// between the two finds another record there, and writes over it only while it holds the lease. Without the lease
    /// the other record may be the attempt of the worker that has the item now.
    async fn claim_one(&self, candidate: Candidate) -> Result<ClaimOutcome> {
        let Candidate { id, mut seen } = candidate;
        let lease = ItemLease::create(&self.keeper, self.names.lease(&id)?, self.lease).await?;
        let Some(lease) = lease else { return Ok(ClaimOutcome::Taken) };
        for _ in 0..ROUNDS {
            if !lease.is_held() {
                break;
            }
            match self.write_attempt(&id, seen).await {
                Ok(Attempted::Written(taken, record)) => {
                    let cas_record = self.state_record(&id)?;
                    let (group, in_time) = (self.clone(), lease.is_held());
                    let lease = Mutex::new(lease);
                    let item = ClaimedItem { group, id, cas_record, taken, record, lease };
                    if in_time {
                        return Ok(ClaimOutcome::Claimed(Box::new(item)));
                    }
                    // The lease ended while this process was paused: another worker may be about to take the item.
                    let _ = item.give_back().await;
                    return Ok(ClaimOutcome::Taken);
                }
                Ok(Attempted::Settled) => {
                    lease.end().await;
                    return Ok(ClaimOutcome::Settled);
                }
                Ok(Attempted::Changed(found)) => seen = found,
                Err(error) => {
                    lease.end().await;
                    return Err(error);
                }
            }
        }
        lease.end().await;
        Ok(ClaimOutcome::Taken)
    }

    async fn write_attempt(&self, id: &str, seen: Option<Snapshot>) -> Result<Attempted> {
        let old = seen.as_ref().map(|snapshot| ItemRecord::parse(id, snapshot)).transpose()?;
        let old = old.unwrap_or_else(ItemRecord::new);
        if old.is_settled() {
            return Ok(Attempted::Settled);
        }
        let (cas_record, now) = (self.state_record(id)?, self.keeper.0.clock.wall());
        if old.attempts >= self.max_attempts {
            let died = "no worker completed it: the last attempt ended with its lease";
            let error = Some(old.error.clone().unwrap_or_else(|| died.into()));
            let record = ItemRecord { error, ..old.next(ItemState::Failed, now) };
            let buried = cas_record.swap(seen.as_ref(), &record.bytes(), None, Retry::Briefly).await?;
            return Ok(buried.map_or_else(Attempted::Changed, |_| Attempted::Settled));
        }
        let record = ItemRecord { attempts: old.attempts + 1, ..old.next(ItemState::Taken, now) };
        let ttl = Some(self.unsettled());
        let written = cas_record.swap(seen.as_ref(), &record.bytes(), ttl, Retry::Briefly).await?;
        Ok(match written {
            Ok(taken) => Attempted::Written(taken, record),
            Err(found) => Attempted::Changed(found),
        })
    }
}

/// The outcome of the write of an attempt.
enum Attempted {
    Written(Snapshot, ItemRecord),
    Settled,
    /// The record was another one.
    Changed(Option<Snapshot>),
}
