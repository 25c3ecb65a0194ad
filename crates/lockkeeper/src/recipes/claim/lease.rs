//! The lease record of an item: it exists while a worker has the item, and the store removes it when the lease is over.
//!
//! The store's own clock ends a lease, so no two clients compare their clocks. The lease record only keeps other workers
//! away; which attempt counts is decided by the state record.

use std::time::Duration;

use lockkeeper_core::{
    BootInstant, DeleteOutcome, Error, Expect, LockName, Result, Version, WriteOutcome, lease::margin, limits,
};
use lockkeeper_host::random_128;
use serde_json::json;

use super::record::this_process;
use crate::keeper::Lockkeeper;
use crate::recipes::cas_record::{Retry, Tries};

/// A lease record that this process has written.
#[derive(Debug)]
pub(super) struct ItemLease {
    keeper: Lockkeeper,
    key: LockName,
    /// The content of the record, with a random mark, so that a write without a reply is found again.
    value: Vec<u8>,
    version: Version,
    ttl: Duration,
    /// Until when it is valid, counted from the moment the request was sent.
    pub deadline: BootInstant,
}

impl ItemLease {
    /// Writes the record if there is none. `None`: another worker has the item, or it waits for its next try.
    pub async fn create(keeper: &Lockkeeper, key: LockName, ttl: Duration) -> Result<Option<ItemLease>> {
        let value = new_value();
        let sent_at = keeper.0.clock.now();
        let mut tries = Tries::new(keeper, Retry::Briefly);
        loop {
            let version = match keeper.0.store.write(&key, &value, Expect::Absent, Some(ttl)).await {
                Ok(WriteOutcome::Written(version)) => version,
                // An earlier try of this request has been applied.
                Ok(WriteOutcome::Conflict(Some(found))) if found.value == value => found.version,
                Ok(WriteOutcome::Conflict(_)) => return Ok(None),
                Err(error) => {
                    tries.after(error).await?;
                    continue;
                }
            };
            let deadline = deadline(sent_at, ttl);
            return Ok(Some(ItemLease { keeper: keeper.clone(), key, value, version, ttl, deadline }));
        }
    }

    /// Whether the lease record of this name exists.
    pub async fn exists(keeper: &Lockkeeper, key: &LockName) -> Result<bool> {
        Ok(keeper.0.store.read(key).await?.is_some())
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

    /// Keeps all workers away for as long as `pause`, and ends then.
    pub async fn back_off(mut self, pause: Duration) {
        if pause.is_zero() {
            return self.end().await;
        }
        let keeper = self.keeper.clone();
        let mut tries = Tries::new(&keeper, Retry::Briefly);
        while let Err(error) = self.replace(pause.max(limits::TTL_MIN)).await {
            if tries.after(error).await.is_err() {
                return;
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

fn over() -> Error {
    Error::Lost("the lease of the item is over: another worker may have it".into())
}

fn new_value() -> Vec<u8> {
    let mark: String = random_128().iter().map(|byte| format!("{byte:02x}")).collect();
    json!({ "v": 1, "mark": mark, "by": this_process() }).to_string().into_bytes()
}
