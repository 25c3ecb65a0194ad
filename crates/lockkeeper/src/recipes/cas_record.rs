//! A record that is written by compare-and-swap, with retries until the outcome of a write is known.
//!
//! A removed value leaves a tombstone with a version for an hour. Without the tombstone a first write whose
//! reply was lost, and that the network delivers again after the removal, would find no record and restore
//! the value.

use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Expect, Fence, LockName, Result, Version, WriteOutcome, limits};
use lockkeeper_host::{Clock, random_128};

use super::backoff::JitteredBackoff;
use super::write_log::{HEADER_BYTES, WriteLog};
use crate::guard::Guard;
use crate::keeper::Lockkeeper;

pub(crate) use super::write_log::Snapshot;

/// The number of tries of a write whose outcome is unknown, for [`Retry::Briefly`].
const TRIES: u32 = 12;
/// How long a tombstone stays: longer than a request can be in flight.
pub(crate) const TOMBSTONE: Duration = Duration::from_secs(60 * 60);

/// The most bytes of a value in one record.
pub const VALUE_BYTES: usize = limits::VALUE_BYTES - HEADER_BYTES;

/// How long a write is retried, each time with the same mark.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retry<'a> {
    /// Up to 12 tries once the outcome of a try is unknown. Every other error is returned at once.
    Briefly,
    /// After every error that may be temporary, for as long as the guard is held, but a ttl at most. The
    /// work is done, and a caller that gave up would make the next holder do it again.
    WhileHeld(&'a Guard),
    /// After every error that may be temporary, until this instant: the end of a lease that is no lock's.
    Until(BootInstant),
}

/// One write and the outcomes of its tries.
pub(crate) struct Tries<'a> {
    retry: Retry<'a>,
    clock: &'a dyn Clock,
    backoff: JitteredBackoff<'a>,
    count: u32,
    /// When the caller gives up on a store that renews the lease and refuses the write.
    give_up: Option<BootInstant>,
    /// The error of a try whose outcome is unknown.
    unknown: Option<String>,
}

impl<'a> Tries<'a> {
    pub fn new(keeper: &'a Lockkeeper, retry: Retry<'a>) -> Self {
        let clock = &*keeper.0.clock;
        Tries { retry, clock, backoff: JitteredBackoff::new(clock), count: 0, give_up: None, unknown: None }
    }

    /// Waits for the next try. `Err`: there is no further try, and this is the outcome.
    pub async fn after(&mut self, error: Error) -> Result<()> {
        if let Error::Unknown(why) = &error {
            self.unknown = Some(why.clone());
        }
        self.count += 1;
        if !self.may_retry(&error) {
            return Err(self.unknown.take().map_or(error, Error::Unknown));
        }
        if self.count == TRIES {
            tracing::warn!(%error, "the store refuses a write; retrying for as long as the lease lasts");
        }
        // Retry at once the first time: the longer the pause, the more writes push this mark out of the
        // log.
        if self.count > 1 {
            self.backoff.wait().await;
        }
        Ok(())
    }

    fn may_retry(&mut self, error: &Error) -> bool {
        if self.unknown.is_some() && self.count < TRIES {
            return true;
        }
        let now = self.clock.now();
        let passes = matches!(error, Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_));
        match self.retry {
            Retry::Briefly => false,
            Retry::WhileHeld(guard) => {
                let give_up = *self.give_up.get_or_insert(now + guard.ttl());
                passes && guard.is_held() && now < give_up
            }
            Retry::Until(end) => passes && now < end,
        }
    }

    /// Whether a tombstone where no value was expected proves that no try of this write was applied before
    /// it.
    fn may_overwrite(&self, tombstone: &Snapshot) -> bool {
        self.unknown.is_none() || tombstone.has_all()
    }

    /// The outcome of a conflict for a writer that does not find its mark.
    fn resolve_conflict(self, old: Option<&Snapshot>, found: Option<Snapshot>) -> Result<SwapResult> {
        match (self.unknown, &found, old) {
            (None, ..) => {}
            // The log has all writes since `old`, and this one is not among them. It cannot be applied any
            // more.
            (_, Some(snapshot), Some(old)) if snapshot.has_all_since(old.fence) => {}
            (Some(why), ..) => return Err(Error::Unknown(why)),
        }
        Ok(Err(found.filter(|snapshot| !snapshot.gone)))
    }
}

/// The result of a swap: the new record, or the record that was found instead of the old one.
pub(crate) type SwapResult = std::result::Result<Snapshot, Option<Snapshot>>;

/// One record of a store.
#[derive(Clone, Debug)]
pub(crate) struct CasRecord {
    pub keeper: Lockkeeper,
    pub key: LockName,
}

impl CasRecord {
    pub fn new(keeper: &Lockkeeper, key: LockName) -> CasRecord {
        CasRecord { keeper: keeper.clone(), key }
    }

    /// The value; `None` if there is none, or only its tombstone.
    pub async fn read(&self) -> Result<Option<Snapshot>> {
        let found = self.keeper.0.store.read(&self.key).await?.map(Snapshot::of).transpose()?;
        Ok(found.filter(|snapshot| !snapshot.gone))
    }

    /// Writes `value` if the record is still `old` (`None`: no value). With a ttl the store removes the
    /// record that long after.
    ///
    /// [`Error::Unknown`] only if the store did not answer, or if so many writes followed that the log does
    /// not reach back.
    pub async fn swap(
        &self,
        old: Option<&Snapshot>,
        value: &[u8],
        ttl: Option<Duration>,
        retry: Retry<'_>,
    ) -> Result<SwapResult> {
        if value.len() > VALUE_BYTES {
            let len = value.len();
            return Err(Error::Limited(format!("a value may have {VALUE_BYTES} bytes, this one has {len}")));
        }
        self.write(old, Some(value), ttl, retry).await
    }

    /// Removes the value if the record is still `old`. `Err` has the record that was found instead; `None`
    /// if there was none.
    pub async fn remove(
        &self,
        old: &Snapshot,
        retry: Retry<'_>,
    ) -> Result<std::result::Result<(), Option<Snapshot>>> {
        Ok(self.write(Some(old), None, Some(TOMBSTONE), retry).await?.map(drop))
    }

    /// Writes a value, or a tombstone.
    async fn write(
        &self,
        old: Option<&Snapshot>,
        value: Option<&[u8]>,
        ttl: Option<Duration>,
        retry: Retry<'_>,
    ) -> Result<SwapResult> {
        let (store, clock) = (&self.keeper.0.store, &self.keeper.0.clock);
        let (mark, began) = (new_mark(), clock.now());
        let mut tries = Tries::new(&self.keeper, retry);
        // A tombstone counts as no value, and is overwritten.
        let mut tombstone = None;
        loop {
            let base = old.or(tombstone.as_ref());
            let log = WriteLog::after(base, mark);
            let new = |fence, log| Snapshot {
                value: value.unwrap_or_default().to_vec(),
                fence,
                gone: value.is_none(),
                log,
            };
            let error = match store.write(&self.key, &log.encode(value), expect(base), ttl).await {
                Ok(WriteOutcome::Written(Version(version))) => {
                    let fence = Fence::new(version)?;
                    return Ok(Ok(new(fence, log)));
                }
                Ok(WriteOutcome::Conflict(found)) => {
                    let found = found.map(Snapshot::of).transpose()?;
                    // An earlier try of this write may be what this try conflicts with.
                    if let Some(fence) = found.as_ref().and_then(|snapshot| snapshot.version_of(mark)) {
                        return Ok(Ok(new(fence, log)));
                    }
                    match found {
                        Some(snapshot)
                            if old.is_none() && snapshot.gone && tries.may_overwrite(&snapshot) =>
                        {
                            tombstone = Some(snapshot);
                            continue;
                        }
                        // The value is gone, as the caller wanted, by this try or another client's.
                        None if value.is_none() && tries.unknown.is_some() => {
                            return Ok(Ok(new(old.map_or(Fence::MIN, |old| old.fence), log)));
                        }
                        found => return tries.resolve_conflict(old, found),
                    }
                }
                Err(error) => error,
            };
            tries.after(error).await?;
            // A tombstone that was written after the first try may have expired by now, and with it the
            // only trace of this write.
            if tries.unknown.is_some() && clock.now().since(began) > TOMBSTONE / 2 {
                return Err(Error::Unknown(tries.unknown.unwrap_or_default()));
            }
        }
    }
}

fn new_mark() -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = random_128();
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

fn expect(old: Option<&Snapshot>) -> Expect {
    old.map_or(Expect::Absent, |snapshot| Expect::Version(Version(snapshot.fence.get())))
}
