//! A value that many processes change by compare-and-swap, without a lock.

use std::fmt;
use std::time::Duration;

use futures_util::stream::BoxStream;
use lockkeeper_core::{Error, Fence, LockName, Page, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::backoff::{JitteredBackoff, pause_between_polls, unfold_forever};
use super::cas_record::{CasRecord, Retry, Snapshot, SwapResult};
use super::need_records;
use crate::keeper::Lockkeeper;
pub use crate::recipes::cas_record::VALUE_BYTES;

/// A value that many processes change by compare-and-swap: a change is written only if no other write came
/// in between.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let visits = keeper.register::<u64>("visits");
/// let done = visits.update(|old| old.unwrap_or(0) + 1).await?;
/// assert_eq!((done.value, done.conflicts), (1, 0));
/// assert_eq!(visits.read().await?.unwrap().fence, done.fence);
/// # Ok(())
/// # }
/// ```
///
/// Every write has a fence: its version, from the counter of the locks' fences, so it grows from write to
/// write, also over a delete. A write whose reply was lost is looked up: it counts once, or returns
/// [`Error::Unknown`] if the record no longer shows whether it was applied.
pub struct Register<T> {
    keeper: Lockkeeper,
    key: Result<LockName>,
    codec: Codec<T>,
    ttl: Option<Duration>,
    conflicts: u32,
    poll: Duration,
}

/// A value, and the fence of the write that it came with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<T> {
    /// The value.
    pub value: T,
    /// Which write it is.
    pub fence: Fence,
}

/// The result of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Updated<T> {
    /// The written value.
    pub value: T,
    /// Which write it is.
    pub fence: Fence,
    /// How often another client wrote first, so that the update was computed again.
    pub conflicts: u32,
}

/// The result of a conditional change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swap<T> {
    /// The change was made; this is its fence.
    Swapped(Fence),
    /// The change was not made; this is the current value.
    Conflict(Option<Entry<T>>),
}

/// How values become bytes: JSON for types that serde knows; bytes are stored as they are.
struct Codec<T> {
    encode: fn(&T) -> Result<Vec<u8>>,
    decode: fn(Vec<u8>) -> Result<T>,
}

impl<T> Clone for Codec<T> {
    fn clone(&self) -> Self {
        Codec { ..*self }
    }
}

impl<T> Clone for Register<T> {
    fn clone(&self) -> Self {
        let (keeper, key, codec) = (self.keeper.clone(), self.key.clone(), self.codec.clone());
        Register { keeper, key, codec, ..*self }
    }
}

impl<T> fmt::Debug for Register<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Register({:?})", self.key)
    }
}

impl Lockkeeper {
    /// The register called `key`, with a value of a type that serde knows, stored as JSON. The first call
    /// reports an invalid key.
    pub fn register<T: Serialize + DeserializeOwned>(&self, key: impl AsRef<str>) -> Register<T> {
        Register::new(self, key.as_ref(), Codec { encode: to_json, decode: of_json })
    }

    /// The register called `key`, with bytes as its value.
    pub fn register_bytes(&self, key: impl AsRef<str>) -> Register<Vec<u8>> {
        Register::new(self, key.as_ref(), Codec { encode: |bytes| Ok(bytes.clone()), decode: Ok })
    }

    /// One page of the values whose keys begin with `prefix`, in order; and where the next page begins.
    pub async fn registers(
        &self,
        prefix: &str,
        page: &Page,
    ) -> Result<(Vec<(LockName, Entry<Vec<u8>>)>, Option<LockName>)> {
        need_records(self, "a register")?;
        let found = self.0.store.scan(prefix, page).await?;
        let mut entries = Vec::new();
        for record in found.records {
            let key = record.key.clone();
            let snapshot = Snapshot::of(record)?;
            if !snapshot.gone {
                entries.push((key, Entry { value: snapshot.value, fence: snapshot.fence }));
            }
        }
        Ok((entries, found.next))
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| Error::invalid(format!("the value cannot be written as JSON: {e}")))
}

fn of_json<T: DeserializeOwned>(bytes: Vec<u8>) -> Result<T> {
    serde_json::from_slice(&bytes)
        .map_err(|e| Error::invalid(format!("the stored value is not of this type: {e}")))
}

impl<T> Register<T> {
    fn new(keeper: &Lockkeeper, key: &str, codec: Codec<T>) -> Self {
        Register {
            keeper: keeper.clone(),
            key: LockName::new(key),
            codec,
            ttl: None,
            conflicts: 1000,
            poll: Duration::from_millis(500),
        }
    }

    /// The store removes the value this long after its last write; at least 100 ms. By default the value
    /// stays.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// How often an update may conflict with other writers before it returns [`Error::Limited`]. 1000 by
    /// default, with random pauses of up to half a second. Writers that conflict that often should use a
    /// lock.
    #[must_use]
    pub fn conflicts(mut self, most: u32) -> Self {
        self.conflicts = most;
        self
    }

    /// How often [`Register::watch`] polls. Every 500 ms by default, give or take a quarter.
    #[must_use]
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    fn cas_record(&self) -> Result<CasRecord> {
        need_records(&self.keeper, "a register")?;
        Ok(CasRecord::new(&self.keeper, self.key.clone()?))
    }

    fn entry(&self, snapshot: Snapshot) -> Result<Entry<T>> {
        Ok(Entry { value: (self.codec.decode)(snapshot.value)?, fence: snapshot.fence })
    }

    /// Reads the value. `None`: there is none.
    pub async fn read(&self) -> Result<Option<Entry<T>>> {
        self.cas_record()?.read().await?.map(|snapshot| self.entry(snapshot)).transpose()
    }

    /// Writes the result of `change`, and calls `change` again with the new value whenever another client
    /// wrote first.
    ///
    /// Dropping the future between two tries changes nothing; dropping it during a write leaves the outcome
    /// unknown.
    pub async fn update(&self, mut change: impl FnMut(Option<T>) -> T) -> Result<Updated<T>> {
        self.try_update(|old| Ok(change(old))).await
    }

    /// The same as [`Register::update`], with a `change` that can fail: its error ends the update, and
    /// nothing is written.
    pub async fn try_update(&self, mut change: impl FnMut(Option<T>) -> Result<T>) -> Result<Updated<T>> {
        let cas_record = self.cas_record()?;
        let mut backoff = JitteredBackoff::new(&*self.keeper.0.clock);
        let mut old = cas_record.read().await?;
        for conflicts in 0..=self.conflicts {
            let before = old.clone().map(|snapshot| self.entry(snapshot)).transpose()?;
            let value = change(before.map(|entry| entry.value))?;
            match cas_record
                .swap(old.as_ref(), &(self.codec.encode)(&value)?, self.ttl, Retry::Briefly)
                .await?
            {
                Ok(new) => return Ok(Updated { value, fence: new.fence, conflicts }),
                Err(_) => backoff.wait().await,
            }
            // Read again: other clients may have written during the pause.
            old = cas_record.read().await?;
        }
        Err(Error::Limited(format!(
            "{} was changed by other clients during all {} tries: use a lock, or allow more conflicts",
            cas_record.key,
            self.conflicts + 1
        )))
    }

    /// Writes `value` if the newest write still has fence `old`; `None` means that there must be no value.
    pub async fn compare_and_set(&self, old: Option<Fence>, value: &T) -> Result<Swap<T>> {
        let bytes = (self.codec.encode)(value)?;
        let cas_record = self.cas_record()?;
        let there = cas_record.read().await?;
        if there.as_ref().map(|snapshot| snapshot.fence) != old {
            return self.answer(Err(there));
        }
        self.answer(cas_record.swap(there.as_ref(), &bytes, self.ttl, Retry::Briefly).await?)
    }

    /// Deletes the value. With a fence: only if the newest write still has it. `Swapped` has the fence of
    /// the deleted value.
    ///
    /// If there is no value, the result is `Conflict(None)`. A tombstone stays for an hour, invisible to
    /// all calls here: it keeps a write that the network delivers late from restoring the value.
    pub async fn remove(&self, only: Option<Fence>) -> Result<Swap<T>> {
        let cas_record = self.cas_record()?;
        loop {
            let Some(there) = cas_record.read().await? else { return Ok(Swap::Conflict(None)) };
            if only.is_some_and(|only| only != there.fence) {
                return self.answer(Err(Some(there)));
            }
            match cas_record.remove(&there, Retry::Briefly).await? {
                Ok(()) => return Ok(Swap::Swapped(there.fence)),
                Err(found) if only.is_some() => return self.answer(Err(found)),
                Err(_) => {}
            }
        }
    }

    fn answer(&self, swapped: SwapResult) -> Result<Swap<T>> {
        Ok(match swapped {
            Ok(new) => Swap::Swapped(new.fence),
            Err(found) => Swap::Conflict(found.map(|snapshot| self.entry(snapshot)).transpose()?),
        })
    }

    /// A stream of the current value (`None`: there is none) and of its changes, each write at most once.
    /// Of several changes between two polls it yields only the last.
    ///
    /// An error is an item of the stream; the stream goes on after it with the current value.
    pub fn watch(&self) -> BoxStream<'static, Result<Option<Entry<T>>>>
    where
        T: Send + 'static,
    {
        let first = (self.clone(), false, None);
        Box::pin(unfold_forever(first, |(register, looked, mut reported)| async move {
            if looked {
                pause_between_polls(&*register.keeper.0.clock, register.poll).await;
            }
            loop {
                match register.read().await {
                    Err(error) => return Some((Err(error), (register, true, reported))),
                    Ok(entry) if reported != Some(entry.as_ref().map(|entry| entry.fence)) => {
                        reported = Some(entry.as_ref().map(|entry| entry.fence));
                        return Some((Ok(entry), (register, true, reported)));
                    }
                    Ok(_) => pause_between_polls(&*register.keeper.0.clock, register.poll).await,
                }
            }
        }))
    }
}
