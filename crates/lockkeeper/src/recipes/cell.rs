//! One record that is written only as expected, by a writer that learns in the end whether it was.
//!
//! A removed value leaves a tombstone with a version for an hour. Without it a first write whose reply was lost, and that
//! the network delivers once more after the removal, would find nothing and bring the value back.

use std::time::Duration;

use lockkeeper_core::{Error, Expect, Fence, LockName, Moment, Result, Version, Write, limits};
use lockkeeper_host::{Clock, random_128};

use super::backoff::Backoff;
use super::trail::{HEADER, Trail};
use crate::guard::Guard;
use crate::keeper::Lockkeeper;

pub(crate) use super::trail::Seen;

/// The number of tries of a write whose outcome is unknown, where nothing says how long to go on.
const TRIES: u32 = 12;
/// How long a tombstone stays: longer than any request can be under way.
const TOMBSTONE: Duration = Duration::from_secs(60 * 60);

/// Bytes of a value that a recipe can keep in one record.
pub const VALUE_BYTES: usize = limits::VALUE_BYTES - HEADER;

/// How long a write is sent again, each time with the same mark.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retry<'a> {
    /// A dozen times once the outcome of a try is unknown. Other errors are the caller's at once.
    Briefly,
    /// For as long as the guard is held, but a ttl at most, after every error that may pass. The work is done, and a caller that
    /// gave up would have the next holder do it again.
    WhileHeld(&'a Guard),
}

/// One write and what came of its tries.
pub(crate) struct Tries<'a> {
    retry: Retry<'a>,
    clock: &'a dyn Clock,
    backoff: Backoff<'a>,
    count: u32,
    /// When a store that renews the lease, and does not take the write, is given up.
    give_up: Option<Moment>,
    /// Why the outcome of a try is unknown, if it is.
    unknown: Option<String>,
}

impl<'a> Tries<'a> {
    pub fn new(keeper: &'a Lockkeeper, retry: Retry<'a>) -> Self {
        let clock = &*keeper.0.clock;
        Tries { retry, clock, backoff: Backoff::new(clock), count: 0, give_up: None, unknown: None }
    }

    /// Waits for the next try. `Err`: there is none, and this is the answer.
    pub async fn after(&mut self, error: Error) -> Result<()> {
        if let Error::Unknown(why) = &error {
            self.unknown = Some(why.clone());
        }
        self.count += 1;
        if !self.goes_on(&error) {
            return Err(self.unknown.take().map_or(error, Error::Unknown));
        }
        if self.count == TRIES {
            tracing::warn!(%error, "the store does not take a write; retrying for as long as the lease lasts");
        }
        // The first time at once: the longer we wait, the more is written that pushes our mark out of the trail.
        if self.count > 1 {
            self.backoff.wait().await;
        }
        Ok(())
    }

    fn goes_on(&mut self, error: &Error) -> bool {
        if self.unknown.is_some() && self.count < TRIES {
            return true;
        }
        let Retry::WhileHeld(guard) = self.retry else { return false };
        let now = self.clock.now();
        let give_up = *self.give_up.get_or_insert(now + guard.ttl());
        let passes = matches!(error, Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_));
        passes && guard.is_held() && now < give_up
    }

    /// Whether a tombstone that stands where nothing was expected says that no try of ours was applied before it.
    fn may_write_over(&self, tombstone: &Seen) -> bool {
        self.unknown.is_none() || tombstone.remembers_all()
    }

    /// What a conflict says to a writer that does not find its mark.
    fn settle(self, old: Option<&Seen>, found: Option<Seen>) -> Result<Swapped> {
        match (self.unknown, &found, old) {
            (None, ..) => {}
            // All that was written since is remembered, and ours is not among it; it cannot come any more.
            (_, Some(seen), Some(old)) if seen.remembers_since(old.fence) => {}
            (Some(why), ..) => return Err(Error::Unknown(why)),
        }
        Ok(Err(found.filter(|seen| !seen.gone)))
    }
}

/// The answer to a swap: the new record, or what was there instead of the old one.
pub(crate) type Swapped = std::result::Result<Seen, Option<Seen>>;

/// One record of a store.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub keeper: Lockkeeper,
    pub key: LockName,
}

impl Cell {
    pub fn new(keeper: &Lockkeeper, key: LockName) -> Cell {
        Cell { keeper: keeper.clone(), key }
    }

    /// The value; `None` if there is none, or only its tombstone.
    pub async fn read(&self) -> Result<Option<Seen>> {
        let found = self.keeper.0.store.read(&self.key).await?.map(Seen::of).transpose()?;
        Ok(found.filter(|seen| !seen.gone))
    }

    /// Writes `value` if `old` is still what is there (`None`: no value). With a ttl it is gone that long after.
    ///
    /// [`Error::Unknown`] only if the store did not answer for long, or so much was written since that no record remembers.
    pub async fn swap(
        &self,
        old: Option<&Seen>,
        value: &[u8],
        ttl: Option<Duration>,
        retry: Retry<'_>,
    ) -> Result<Swapped> {
        if value.len() > VALUE_BYTES {
            let len = value.len();
            return Err(Error::Limited(format!("a value may have {VALUE_BYTES} bytes, this one has {len}")));
        }
        self.write(old, Some(value), ttl, retry).await
    }

    /// Removes the value if `old` is still what is there. `Err`: this is there instead; `None`, nothing.
    pub async fn remove(
        &self,
        old: &Seen,
        retry: Retry<'_>,
    ) -> Result<std::result::Result<(), Option<Seen>>> {
        Ok(self.write(Some(old), None, Some(TOMBSTONE), retry).await?.map(drop))
    }

    /// Writes a value, or a tombstone.
    async fn write(
        &self,
        old: Option<&Seen>,
        value: Option<&[u8]>,
        ttl: Option<Duration>,
        retry: Retry<'_>,
    ) -> Result<Swapped> {
        let (store, clock) = (&self.keeper.0.store, &self.keeper.0.clock);
        let (mark, began) = (new_mark(), clock.now());
        let mut tries = Tries::new(&self.keeper, retry);
        // A tombstone counts as nothing, and is written over.
        let mut tombstone = None;
        loop {
            let base = old.or(tombstone.as_ref());
            let trail = Trail::after(base, mark);
            let new = |fence, trail| Seen {
                value: value.unwrap_or_default().to_vec(),
                fence,
                gone: value.is_none(),
                trail,
            };
            let error = match store.write(&self.key, &trail.before(value), expect(base), ttl).await {
                Ok(Write::Written(Version(version))) => {
                    let fence = Fence::new(version)?;
                    debug_assert!(base.is_none_or(|base| base.fence < fence));
                    return Ok(Ok(new(fence, trail)));
                }
                Ok(Write::Conflict(found)) => {
                    let found = found.map(Seen::of).transpose()?;
                    // An earlier try may have been the one that is in its own way.
                    if let Some(fence) = found.as_ref().and_then(|seen| seen.version_of(mark)) {
                        return Ok(Ok(new(fence, trail)));
                    }
                    match found {
                        Some(seen) if old.is_none() && seen.gone && tries.may_write_over(&seen) => {
                            tombstone = Some(seen);
                            continue;
                        }
                        // It is as the caller wanted it, whoever did it.
                        None if value.is_none() && tries.unknown.is_some() => {
                            return Ok(Ok(new(old.map_or(Fence::MIN, |old| old.fence), trail)));
                        }
                        found => return tries.settle(old, found),
                    }
                }
                Err(error) => error,
            };
            tries.after(error).await?;
            // A tombstone that came after the first try may be gone by now, and with it the only trace of our own write.
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

fn expect(old: Option<&Seen>) -> Expect {
    old.map_or(Expect::Absent, |seen| Expect::Version(Version(seen.fence.get())))
}
