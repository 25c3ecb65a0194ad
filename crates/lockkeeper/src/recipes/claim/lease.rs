//! The lease record of an item: it exists while a worker has the item, and the store removes it when the lease is over.
//!
//! The store's own clock ends a lease, so no two clients compare their clocks. The lease record only keeps other workers
//! away; which attempt counts is decided by the state record.
//!
//! A lease that ends early leaves a tombstone for an hour. Without the tombstone a first write whose reply was lost, and
//! that the network delivers after the end, would find no record, and keep all workers away for a lease that no worker has.

use std::time::Duration;

use lockkeeper_core::{
    BootInstant, DeleteOutcome, Error, Expect, LockName, Record, Result, Version, WallTime, WriteOutcome,
    lease::margin, limits,
};
use lockkeeper_host::random_128;
use serde_json::{Value, json};

use super::record::this_process;
use crate::keeper::Lockkeeper;
use crate::recipes::cas_record::{Retry, Snapshot, TOMBSTONE, Tries};

/// A lease record that this process has written.
#[derive(Debug)]
pub(super) struct ItemLease {
    keeper: Lockkeeper,
    key: LockName,
    /// The content of the record, with a random mark, so that a write without a reply is found again.
    value: Vec<u8>,
    version: Version,
    ttl: Duration,
    /// A first write, of this lease or of an earlier one, may still reach the store.
    may_come_late: bool,
    /// Until when it is valid, counted from the moment the request was sent.
    pub deadline: BootInstant,
}

impl ItemLease {
    /// Writes the record if there is none. `None`: another worker has the item, or it waits for its next try.
    pub async fn create(keeper: &Lockkeeper, key: LockName, ttl: Duration) -> Result<Option<ItemLease>> {
        let value = new_value();
        let sent_at = keeper.0.clock.now();
        let (mut expect, mut may_come_late) = (Expect::Absent, false);
        let mut tries = Tries::new(keeper, Retry::Briefly);
        loop {
            let version = match keeper.0.store.write(&key, &value, expect, Some(ttl)).await {
                Ok(WriteOutcome::Written(version)) => version,
                // An earlier try of this request has been applied.
                Ok(WriteOutcome::Conflict(Some(found))) if found.value == value => found.version,
                Ok(WriteOutcome::Conflict(Some(found))) if !keeps_away(keeper, &found) => {
                    (expect, may_come_late) = (Expect::Version(found.version), true);
                    continue;
                }
                Ok(WriteOutcome::Conflict(_)) => return Ok(None),
                Err(error) => {
                    may_come_late |= matches!(error, Error::Unknown(_));
                    tries.after(error).await?;
                    continue;
                }
            };
            let (keeper, deadline) = (keeper.clone(), deadline(sent_at, ttl));
            return Ok(Some(ItemLease { keeper, key, value, version, ttl, may_come_late, deadline }));
        }
    }

    /// Whether the record of this name keeps workers away.
    pub async fn exists(keeper: &Lockkeeper, key: &LockName) -> Result<bool> {
        Ok(keeper.0.store.read(key).await?.is_some_and(|found| keeps_away(keeper, &found)))
    }

    pub fn is_held(&self) -> bool {
        self.keeper.0.clock.now() < self.deadline
    }

    /// Lets the lease count anew. [`Error::Lost`] if the record is gone: a lease that is over does not come back.
    pub async fn extend(&mut self) -> Result<()> {
        let (keeper, sent_at) = (self.keeper.clone(), self.keeper.0.clock.now());
        if !self.is_held() {
            return Err(over());
        }
        let mut tries = Tries::new(&keeper, Retry::Until(self.deadline));
        loop {
            match self.replace(self.ttl).await {
                Ok(true) => {
                    // The first try may be the one that was applied.
                    self.deadline = deadline(sent_at, self.ttl);
                    return Ok(());
                }
                Ok(false) => return Err(over()),
                Err(error) => tries.after(error).await?,
            }
        }
    }

    /// Ends the lease. If the store does not answer, the lease ends with its ttl.
    pub async fn end(self) {
        if self.may_come_late {
            return self.free().await;
        }
        let mut tries = Tries::new(&self.keeper, Retry::Briefly);
        loop {
            match self.keeper.0.store.delete(&self.key, Expect::Version(self.version)).await {
                // Extended by a request of this process whose reply was lost.
                Ok(DeleteOutcome::Conflict(found)) if found.value == self.value => {
                    let _ = self.keeper.0.store.delete(&self.key, Expect::Version(found.version)).await;
                    return;
                }
                Ok(_) => return,
                Err(error) => {
                    if tries.after(error).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Ends the lease of an item that another worker is to have, and leaves a tombstone.
    pub async fn free(self) {
        self.leave_marker(WallTime::default(), TOMBSTONE).await;
    }

    /// Keeps all workers away for as long as `pause`, and ends then.
    pub async fn back_off(mut self, pause: Duration) {
        if pause.is_zero() {
            return self.free().await;
        }
        if self.may_come_late {
            // The record has to outlive the pause, so the clocks of the workers tell when it is over.
            let pause_ends = self.keeper.0.clock.wall().as_micros().saturating_add(pause.as_micros() as u64);
            return self
                .leave_marker(WallTime::from_micros(pause_ends), pause.saturating_add(TOMBSTONE))
                .await;
        }
        let keeper = self.keeper.clone();
        let mut tries = Tries::new(&keeper, Retry::Briefly);
        while let Err(error) = self.replace(pause.max(limits::TTL_MIN)).await {
            if tries.after(error).await.is_err() {
                return;
            }
        }
    }

    /// Replaces the record of this lease by one that keeps workers away until `free_at`. If the store does not answer, the
    /// lease ends with its ttl.
    async fn leave_marker(self, free_at: WallTime, ttl: Duration) {
        let value = json!({ "v": 1, "free_at": free_at.as_micros() }).to_string().into_bytes();
        let (mut expect, mut own) = (Expect::Version(self.version), self.value);
        let mut tries = Tries::new(&self.keeper, Retry::Briefly);
        loop {
            match self.keeper.0.store.write(&self.key, &value, expect, Some(ttl)).await {
                // Extended by a request of this process whose reply was lost: once at most, because no other follows.
                Ok(WriteOutcome::Conflict(Some(found))) if found.value == own => {
                    expect = Expect::Version(found.version);
                    own.clear();
                }
                Ok(_) => return,
                Err(error) => {
                    if tries.after(error).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Writes the record over the one of this lease, with this ttl. `false`: it is gone.
    async fn replace(&mut self, ttl: Duration) -> Result<bool> {
        let expect = Expect::Version(self.version);
        match self.keeper.0.store.write(&self.key, &self.value, expect, Some(ttl)).await? {
            WriteOutcome::Written(version) => {
                self.version = version;
                Ok(true)
            }
            // An earlier try, or a call that was dropped, has been applied: the next try counts from now.
            WriteOutcome::Conflict(Some(found)) if found.value == self.value => {
                self.version = found.version;
                Err(Error::Unknown("an earlier request for the same lease was applied".into()))
            }
            WriteOutcome::Conflict(_) => Ok(false),
        }
    }
}

fn deadline(sent_at: BootInstant, ttl: Duration) -> BootInstant {
    (sent_at + ttl).before(margin(ttl))
}

/// Whether a record with the name of a lease keeps workers away: not if it is the marker of a lease that has ended, or the
/// tombstone that is left when an operator removes a lease.
pub(super) fn keeps_away(keeper: &Lockkeeper, record: &Record) -> bool {
    if Snapshot::of(record.clone()).is_ok_and(|snapshot| snapshot.gone) {
        return false;
    }
    let marker = serde_json::from_slice::<Value>(&record.value).ok();
    let free_at = marker.and_then(|marker| marker["free_at"].as_u64());
    free_at.is_none_or(|free_at| keeper.0.clock.wall().as_micros() < free_at)
}

fn over() -> Error {
    Error::Lost("the lease of the item is over: another worker may have it".into())
}

fn new_value() -> Vec<u8> {
    let mark: String = random_128().iter().map(|byte| format!("{byte:02x}")).collect();
    json!({ "v": 1, "mark": mark, "by": this_process() }).to_string().into_bytes()
}
