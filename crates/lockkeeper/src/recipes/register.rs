use std::fmt;
use std::time::Duration;

use futures_util::stream::BoxStream;
use lockkeeper_core::{Error, Fence, LockName, Page, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::backoff::{Backoff, endless, look_again};
use super::cell::{Cell, Retry, Seen, Swapped};
use super::need_records;
use crate::keeper::Lockkeeper;

/// One value that many change, without a lock: each change is made only if nobody else made one meanwhile.
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
/// Every write has a fence: its version, from the counter that the fences of locks come from, so it grows from write to
/// write, also over a delete. A write whose answer got lost is looked up: it counts once, or is told as
/// [`Error::Unknown`] if nobody can know any more.
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
    /// What it says.
    pub value: T,
    /// Which write it is.
    pub fence: Fence,
}

/// What came of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Updated<T> {
    /// What was written.
    pub value: T,
    /// Which write it is.
    pub fence: Fence,
    /// How often somebody else was quicker, and the update was made anew.
    pub conflicts: u32,
}

/// The answer to a change that was to happen only if nothing else had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swap<T> {
    /// It happened, and this is its fence.
    Swapped(Fence),
    /// It did not; this is there instead.
    Conflict(Option<Entry<T>>),
}

/// How values become bytes: JSON for what serde knows, nothing at all for bytes.
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
    /// The value called `key`, of a type that serde knows; it is kept as JSON. A bad key is told by the first call.
    pub fn register<T: Serialize + DeserializeOwned>(&self, key: impl AsRef<str>) -> Register<T> {
        Register::new(self, key.as_ref(), Codec { encode: to_json, decode: of_json })
    }

    /// The value called `key`, as bytes.
    pub fn register_bytes(&self, key: impl AsRef<str>) -> Register<Vec<u8>> {
        Register::new(self, key.as_ref(), Codec { encode: |bytes| Ok(bytes.clone()), decode: Ok })
    }

    /// The values whose keys begin with `prefix`, in order, a page at a time; and where the next page begins.
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
            let seen = Seen::of(record)?;
            if !seen.gone {
                entries.push((key, Entry { value: seen.value, fence: seen.fence }));
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
        .map_err(|e| Error::invalid(format!("what is there is not a value of this type: {e}")))
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

    /// The value is gone this long after it was written last; at least 100 ms. By default it stays.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// How often an update may lose against others before it is [`Error::Limited`]. 1000 by default, with random pauses
    /// of up to half a second between: who loses that often should take turns under a lock instead.
    #[must_use]
    pub fn conflicts(mut self, most: u32) -> Self {
        self.conflicts = most;
        self
    }

    /// How often [`Register::watch`] looks. Every 500 ms by default, give or take a quarter.
    #[must_use]
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    fn cell(&self) -> Result<Cell> {
        need_records(&self.keeper, "a register")?;
        Ok(Cell::new(&self.keeper, self.key.clone()?))
    }

    fn entry(&self, seen: Seen) -> Result<Entry<T>> {
        Ok(Entry { value: (self.codec.decode)(seen.value)?, fence: seen.fence })
    }

    /// The value as it is now. `None`: there is none.
    pub async fn read(&self) -> Result<Option<Entry<T>>> {
        self.cell()?.read().await?.map(|seen| self.entry(seen)).transpose()
    }

    /// Writes what `change` makes of the value that is there, and asks `change` again whenever somebody else was quicker.
    ///
    /// Dropping the future between two tries changes nothing; dropping it while it writes leaves the outcome open.
    pub async fn update(&self, mut change: impl FnMut(Option<T>) -> T) -> Result<Updated<T>> {
        self.try_update(|old| Ok(change(old))).await
    }

    /// The same, with a `change` that may refuse: its error ends the update, and nothing is written.
    pub async fn try_update(&self, mut change: impl FnMut(Option<T>) -> Result<T>) -> Result<Updated<T>> {
        let cell = self.cell()?;
        let mut backoff = Backoff::new(&*self.keeper.0.clock);
        let mut old = cell.read().await?;
        for conflicts in 0..=self.conflicts {
            let before = old.clone().map(|seen| self.entry(seen)).transpose()?;
            let value = change(before.map(|entry| entry.value))?;
            match cell.swap(old.as_ref(), &(self.codec.encode)(&value)?, self.ttl, Retry::Briefly).await? {
                Ok(new) => return Ok(Updated { value, fence: new.fence, conflicts }),
                Err(_) => backoff.wait().await,
            }
            // What is there now, not what was there when we lost: much may have happened during the pause.
            old = cell.read().await?;
        }
        Err(Error::Limited(format!(
            "{} was changed by others {} times while we tried: take turns under a lock, or allow more conflicts",
            cell.key,
            self.conflicts + 1
        )))
    }

    /// Writes `value` if the newest write is still the one with fence `old`; `None` if there must be no value.
    pub async fn compare_and_set(&self, old: Option<Fence>, value: &T) -> Result<Swap<T>> {
        let bytes = (self.codec.encode)(value)?;
        let cell = self.cell()?;
        let there = cell.read().await?;
        if there.as_ref().map(|seen| seen.fence) != old {
            return self.answer(Err(there));
        }
        self.answer(cell.swap(there.as_ref(), &bytes, self.ttl, Retry::Briefly).await?)
    }

    /// Deletes the value. With a fence: only if that is still the newest write. `Swapped` has the fence of what is gone.
    ///
    /// No value at all is a conflict with nothing. A tombstone stays for an hour, which no call here shows: it keeps a write
    /// that the network delivers late from bringing the value back.
    pub async fn remove(&self, only: Option<Fence>) -> Result<Swap<T>> {
        let cell = self.cell()?;
        loop {
            let Some(there) = cell.read().await? else { return Ok(Swap::Conflict(None)) };
            if only.is_some_and(|only| only != there.fence) {
                return self.answer(Err(Some(there)));
            }
            match cell.remove(&there, Retry::Briefly).await? {
                Ok(()) => return Ok(Swap::Swapped(there.fence)),
                Err(found) if only.is_some() => return self.answer(Err(found)),
                Err(_) => {}
            }
        }
    }

    fn answer(&self, swapped: Swapped) -> Result<Swap<T>> {
        Ok(match swapped {
            Ok(new) => Swap::Swapped(new.fence),
            Err(found) => Swap::Conflict(found.map(|seen| self.entry(seen)).transpose()?),
        })
    }

    /// The value as it is now (`None`: there is none), and then as it changes: never twice the same write. Of several
    /// changes between two looks only the last is seen.
    ///
    /// An error is an item like others: the stream goes on after it, and tells what is true then.
    pub fn watch(&self) -> BoxStream<'static, Result<Option<Entry<T>>>>
    where
        T: Send + 'static,
    {
        let first = (self.clone(), false, None);
        Box::pin(endless(first, |(register, looked, mut told)| async move {
            if looked {
                look_again(&*register.keeper.0.clock, register.poll).await;
            }
            loop {
                match register.read().await {
                    Err(error) => return Some((Err(error), (register, true, told))),
                    Ok(entry) if told != Some(entry.as_ref().map(|entry| entry.fence)) => {
                        told = Some(entry.as_ref().map(|entry| entry.fence));
                        return Some((Ok(entry), (register, true, told)));
                    }
                    Ok(_) => look_again(&*register.keeper.0.clock, register.poll).await,
                }
            }
        }))
    }
}
