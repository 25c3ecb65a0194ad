//! Changes of lock items by compare-and-swap: read, decide, write if the revision is unchanged; repeat if it is not.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::try_join_all;
use lockkeeper_core::{BootInstant, Fence, LockName, Names, Result, WallTime};
use lockkeeper_host::{boot_id, random_128, sleep_until};

use crate::attributes::AttributeMap;
use crate::backoff::{ThrottleBackoff, jitter};
use crate::codec::{LockItem, StoredTimer, millis};
use crate::config::Options;
use crate::error::Failure;
use crate::keys;
use crate::local_queue::{LocalQueues, WritePermit};
use crate::observation::{HoldPhase, Observation, ObservationCache, ObserverClock};
use crate::server_clock::DynamoClock;
use crate::statements::{TableClient, TableWrite};

/// After how many conflicts an update fails.
const MAX_CONFLICTS: u32 = 60;

/// The items of the locks, as this process reads and writes them.
pub struct LockTable {
    pub options: Options,
    pub client: TableClient,
    clock: DynamoClock,
    observations: ObservationCache,
    pub queues: LocalQueues,
    /// The boot of the machine: its processes share a clock.
    boot: String,
}

/// The working copy of one lock's item, which an update changes and then writes.
#[derive(Clone, Debug)]
pub struct WorkingCopy {
    pub name: LockName,
    pub item: LockItem,
    pub observed: Observation,
    /// The revision that our write will have.
    pub next_revision: u64,
    /// The copy was changed and must be written.
    pub dirty: bool,
}

impl WorkingCopy {
    fn new(name: &LockName, item: LockItem, observed: Observation) -> WorkingCopy {
        // An item that was deleted and created again does not repeat a revision.
        let next_revision = item.revision.map_or(observed.wall.as_micros(), |revision| revision + 1);
        WorkingCopy { name: name.clone(), item, observed, next_revision, dirty: false }
    }

    /// A timer that starts at our write.
    pub fn start_timer(&self, ms: u64) -> StoredTimer {
        let ends_us = self.observed.wall.as_micros().saturating_add(ms.saturating_mul(1000));
        StoredTimer { revision: self.next_revision, ms, ends_us }
    }

    /// Restarts the lease of a hold at our write.
    pub fn renew(&mut self, attempt_hash: &str) {
        let Some(i) = self.item.state.holds.iter().position(|hold| hold.attempt_hash == attempt_hash) else {
            return;
        };
        self.item.state.holds[i].lease = self.start_timer(self.item.state.holds[i].lease.ms);
        self.dirty = true;
    }

    /// Ends a hold that was not released, and starts its lock-delay.
    pub fn end_uncleanly(&mut self, attempt_hash: &str) {
        let Some(hold) = self.item.state.find(attempt_hash) else { return };
        let ms = hold.lock_delay_ms;
        self.end(attempt_hash);
        self.start_lock_delay(ms);
    }

    /// Ends a hold.
    pub fn end(&mut self, attempt_hash: &str) {
        self.item.state.holds.retain(|hold| hold.attempt_hash != attempt_hash);
        self.item.state.remove_unused_reasons();
        self.dirty = true;
    }

    /// Starts a lock-delay, unless a longer one is running.
    pub fn start_lock_delay(&mut self, ms: u64) {
        let running = self.item.state.lock_delay.as_ref();
        let running = running.map_or(Duration::ZERO, |delay| self.observed.remaining(delay, 0));
        if ms > 0 && running < Duration::from_millis(ms) {
            self.item.state.lock_delay = Some(self.start_timer(ms));
            self.dirty = true;
        }
    }

    /// Withdraws the exclusive intent of an attempt.
    pub fn clear_intent(&mut self, attempt_hash: &str) {
        let own = self.item.state.exclusive_intent.take_if(|intent| intent.attempt_hash == attempt_hash);
        self.dirty |= own.is_some();
    }

    /// Removes what has expired.
    pub fn sweep(&mut self) {
        let (observed, state) = (&self.observed, &mut self.item.state);
        state.holds.retain(|hold| observed.phase(hold) != HoldPhase::Ended);
        state.remove_unused_reasons();
        state.lock_delay.take_if(|delay| observed.remaining(delay, 0).is_zero());
        state.exclusive_intent.take_if(|intent| intent.ends_us <= observed.wall.as_micros());
        let revisions: Vec<u64> = state.timers().map(|timer| timer.revision).collect();
        state.observations.retain(|one| revisions.iter().any(|revision| one.revision >= *revision));
        self.dirty = true;
    }
}

/// The decision of an update about its working copies.
pub enum CasDecision<T> {
    /// Return this; nothing needs to be written.
    Return(T),
    /// Return this once the changed copies are written.
    Write(T),
}

impl<T> CasDecision<T> {
    /// `Write` if a copy was changed, else `Return`.
    pub fn write_if_changed(copies: &[WorkingCopy], value: T) -> Self {
        if copies.iter().any(|copy| copy.dirty) {
            CasDecision::Write(value)
        } else {
            CasDecision::Return(value)
        }
    }
}

impl LockTable {
    pub fn new(options: Options, client: TableClient, clock: DynamoClock) -> Self {
        LockTable {
            options,
            client,
            clock,
            observations: ObservationCache::default(),
            queues: LocalQueues::default(),
            boot: boot(boot_id().ok().flatten()),
        }
    }

    /// The clocks of this process, now.
    pub fn observer(&self) -> ObserverClock<'_> {
        ObserverClock { now: self.options.clock.now(), wall: self.clock.now(), boot: &self.boot }
    }

    /// Updates the items of these locks. Returns the answer, and the moment from which it counts.
    pub async fn update<T>(
        &self,
        names: &Names,
        decide: impl FnMut(&mut [WorkingCopy]) -> Result<CasDecision<T>>,
    ) -> Result<(T, BootInstant)> {
        self.update_with_priority(false, names, decide).await
    }

    /// The same, `urgent` or not. The updates of one process write one after another, because each has a condition on the
    /// item that the others change. An urgent update is the next to write.
    pub async fn update_with_priority<T>(
        &self,
        urgent: bool,
        names: &Names,
        mut decide: impl FnMut(&mut [WorkingCopy]) -> Result<CasDecision<T>>,
    ) -> Result<(T, BootInstant)> {
        let clock = &*self.options.clock;
        let queue = self.queues.get(names.first());
        let mut permit = None;
        let mut known = self.cached(names);
        let mut fresh = false;
        let (mut conflicts, mut backoff) = (0, ThrottleBackoff::new(&self.options));
        loop {
            let mut copies = match known.take() {
                Some(copies) => copies,
                None => {
                    fresh = true;
                    match self.read(names).await {
                        Ok(copies) => copies?,
                        Err(failure) => {
                            // Other updates do not wait for our pause.
                            permit = None;
                            backoff.pause(failure).await?;
                            continue;
                        }
                    }
                }
            };
            let before = clock.now();
            let answer = match decide(&mut copies) {
                Ok(CasDecision::Write(answer)) if copies.iter().any(|copy| copy.dirty) => answer,
                // The cache may be stale: an answer that writes nothing needs a read first.
                _ if !fresh => continue,
                Ok(CasDecision::Write(answer) | CasDecision::Return(answer)) => return Ok((answer, before)),
                Err(error) => return Err(error),
            };
            if permit.is_none() {
                permit = queue.try_write();
                if permit.is_none() {
                    permit = Some(queue.write(urgent).await);
                    // The updates before this one have changed the item.
                    (known, fresh) = (self.cached(names), false);
                    continue;
                }
            }
            // Taken before the wall clock was read for the write: a pause in between must not make the lease look longer to the
            // holder than to others.
            let sent_at = copies.iter().map(|copy| copy.observed.now).min().unwrap_or(before);
            match self.commit_with(&mut permit, &copies).await? {
                Ok(()) => return Ok((answer, sent_at)),
                Err(Failure::Conflict(found)) => {
                    conflicts += 1;
                    if conflicts >= MAX_CONFLICTS {
                        return Err(Failure::Conflict(None).into());
                    }
                    if let (Some(found), [name]) = (found, names.as_slice()) {
                        known = Some(vec![self.observe(name, found.as_ref())?]);
                        fresh = true;
                    }
                    self.pause_after(conflicts).await;
                }
                Err(failure) => {
                    permit = None;
                    backoff.pause(failure).await?;
                }
            }
        }
    }

    /// Writes. A missing reply delays the other updates of this process for a quarter of the timeout at most: then they may write, and
    /// the condition on the revision keeps them apart.
    async fn commit_with(
        &self,
        permit: &mut Option<WritePermit<'_>>,
        copies: &[WorkingCopy],
    ) -> Result<Result<(), Failure>> {
        let clock = &*self.options.clock;
        let mut commit = pin!(self.commit(copies));
        tokio::select! {
            committed = &mut commit => committed,
            () = sleep_until(clock, clock.now() + self.options.timeout / 4), if permit.is_some() => {
                *permit = None;
                commit.await
            }
        }
    }

    /// The back-off with jitter keeps the processes that conflict from writing together again.
    async fn pause_after(&self, conflicts: u32) {
        let (clock, most) = (&*self.options.clock, Duration::from_millis(4 << conflicts.min(6)));
        sleep_until(clock, clock.now() + jitter(most)).await;
    }

    fn cached(&self, names: &Names) -> Option<Vec<WorkingCopy>> {
        let observer = self.observer();
        let cached = |name: &LockName| {
            let (item, observed) = self.observations.cached(name, &observer)?;
            Some(WorkingCopy::new(name, item, observed))
        };
        names.iter().map(cached).collect()
    }

    /// Reads the items one by one: the write has a condition on each.
    async fn read(&self, names: &Names) -> Result<Result<Vec<WorkingCopy>>, Failure> {
        let keys: Vec<String> = names.iter().map(keys::lock).collect();
        let items = try_join_all(keys.iter().map(|key| self.client.get(key))).await?;
        Ok(names.iter().zip(&items).map(|(name, item)| self.observe(name, item.as_ref())).collect())
    }

    /// Decodes an item that was just read, and records the observation.
    pub fn observe(&self, name: &LockName, item: Option<&AttributeMap>) -> Result<WorkingCopy> {
        let item = LockItem::decode(item)?;
        let observed = self.observations.record(name, &item, &self.observer());
        Ok(WorkingCopy::new(name, item, observed))
    }

    async fn commit(&self, copies: &[WorkingCopy]) -> Result<Result<(), Failure>> {
        let dirty = || copies.iter().filter(|copy| copy.dirty);
        let put = |copy: &WorkingCopy| {
            let item = copy.item.encode(keys::lock(&copy.name), copy.next_revision)?;
            Ok(TableWrite::Put { item, over: copy.item.revision })
        };
        let writes = dirty().map(put).collect::<Result<Vec<TableWrite>>>()?;
        // Before the call: its outcome may stay unknown, also because the caller is cancelled.
        dirty().for_each(|copy| self.observations.invalidate(&copy.name));
        let answer = self.client.write(writes).await;
        if answer.is_ok() {
            for copy in dirty() {
                let item = LockItem { revision: Some(copy.next_revision), ..copy.item.clone() };
                self.observations.record(&copy.name, &item, &self.observer());
            }
        }
        Ok(answer)
    }

    /// The fence after the highest of these locks.
    pub fn next_fence(&self, copies: &[WorkingCopy]) -> Result<Fence> {
        Fence::after(copies.iter().filter_map(|copy| copy.item.fence).max(), self.clock.now())
    }
}

/// The wall clock plus a duration, in µs.
pub fn after(wall: WallTime, time: Duration) -> u64 {
    wall.as_micros().saturating_add(millis(time).saturating_mul(1000))
}

/// The identity of the boot-time clock of this process: the boot, and the time namespace of the container. If the boot is
/// unknown, a random value takes its place, because two machines must not take each other's moments for their own.
fn boot(id: Option<String>) -> String {
    let id = id.unwrap_or_else(|| format!("{:032x}", u128::from_be_bytes(random_128())));
    let clock = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    format!("{id} {}", clock.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_an_unknown_boot_share_no_clock() {
        assert_ne!(boot(None), boot(None));
        assert_eq!(boot(Some("one".into())), boot(Some("one".into())));
    }
}
