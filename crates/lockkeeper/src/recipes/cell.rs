//! One record that is written only as expected, and always knows whether it was.
//!
//! A write whose answer is lost may have happened. So every write carries a mark of its own, and every value the marks of
//! the few writes before it, with their versions: whoever is in doubt looks there. Without that a counter would lose an
//! increment, or count one twice, each time a connection breaks at the wrong moment.
//!
//! ```text
//! lk1 MARK MARK:VERSION MARK:VERSION …⏎       the newest write first
//! anything                                    what the user wrote
//! ```

use std::fmt::Write as _;
use std::time::Duration;

use lockkeeper_core::{Delete, Error, Expect, Fence, LockName, Record, Result, Version, Write, limits};
use lockkeeper_host::random_128;

use super::backoff::Backoff;
use crate::keeper::Lockkeeper;

/// How many writes before the newest are remembered.
const TRAIL: usize = 32;
/// What the trail may take of a record's value.
const HEADER: usize = 2048;
/// How often a write in doubt is sent again before we give up on knowing.
const TRIES: u32 = 12;

/// Bytes of a value that a recipe can keep in one record.
pub const VALUE_BYTES: usize = limits::VALUE_BYTES - HEADER;

/// A record as it was found, or as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub value: Vec<u8>,
    /// The version of the write. Versions and fences come from one counter, so it can stand where a fence can.
    pub fence: Fence,
    trail: Trail,
}

/// The newest write and the ones before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Trail {
    newest: u64,
    before: Vec<(u64, u64)>,
}

impl Seen {
    pub fn of(record: Record) -> Result<Seen> {
        let fence = Fence::new(record.version.0)?;
        let (trail, value) = match Trail::parse(&record.value) {
            Some((trail, length)) => (trail, record.value[length..].to_vec()),
            // Somebody else's record: all of it is the value.
            None => (Trail::default(), record.value),
        };
        Ok(Seen { value, fence, trail })
    }

    /// The version of the write with this mark, if it was one of the last few.
    fn version_of(&self, mark: u64) -> Option<Fence> {
        if self.trail.newest == mark {
            return Some(self.fence);
        }
        let (_, version) = self.trail.before.iter().find(|(m, _)| *m == mark)?;
        Fence::new(*version).ok()
    }

    /// Whether every write since `fence` is remembered here.
    fn remembers_since(&self, fence: Fence) -> bool {
        self.fence == fence || self.trail.before.iter().any(|(_, version)| *version == fence.get())
    }
}

impl Trail {
    fn after(old: Option<&Seen>, mark: u64) -> Trail {
        let last = old.map(|seen| (seen.trail.newest, seen.fence.get()));
        let older = old.map_or(&[][..], |seen| &seen.trail.before);
        Trail { newest: mark, before: last.into_iter().chain(older.iter().copied()).take(TRAIL).collect() }
    }

    fn before(&self, value: &[u8]) -> Vec<u8> {
        let mut line = format!("lk1 {:016x}", self.newest);
        for (mark, version) in &self.before {
            let _ = write!(line, " {mark:016x}:{version}");
        }
        debug_assert!(line.len() < HEADER);
        [line.as_bytes(), b"\n", value].concat()
    }

    /// The trail at the beginning of `value`, and how long it is.
    fn parse(value: &[u8]) -> Option<(Trail, usize)> {
        let end = value.iter().take(HEADER).position(|b| *b == b'\n')?;
        let line = std::str::from_utf8(&value[..end]).ok()?.strip_prefix("lk1 ")?;
        let mut words = line.split(' ');
        let newest = u64::from_str_radix(words.next()?, 16).ok()?;
        let earlier = |word: &str| {
            let (mark, version) = word.split_once(':')?;
            Some((u64::from_str_radix(mark, 16).ok()?, version.parse().ok()?))
        };
        Some((Trail { newest, before: words.map(earlier).collect::<Option<_>>()? }, end + 1))
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

    pub async fn read(&self) -> Result<Option<Seen>> {
        self.keeper.0.store.read(&self.key).await?.map(Seen::of).transpose()
    }

    /// Writes `value` if `old` is still what is there (`None`: nothing). With a ttl it is gone that long after.
    ///
    /// [`Error::Unknown`] only if the store did not answer for long, or so much was written since that nobody remembers.
    pub async fn swap(&self, old: Option<&Seen>, value: &[u8], ttl: Option<Duration>) -> Result<Swapped> {
        if value.len() > VALUE_BYTES {
            let len = value.len();
            return Err(Error::Limited(format!("a value may have {VALUE_BYTES} bytes, this one has {len}")));
        }
        let [a, b, c, d, e, f, g, h, ..] = random_128();
        let mark = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
        let trail = Trail::after(old, mark);
        let (bytes, expect) = (trail.before(value), expect(old));
        let inner = &self.keeper.0;
        let mut backoff = Backoff::new(&*inner.clock);
        let mut doubt = None;
        for tries in 0..TRIES {
            match inner.store.write(&self.key, &bytes, expect, ttl).await {
                Ok(Write::Written(Version(version))) => {
                    let fence = Fence::new(version)?;
                    debug_assert!(old.is_none_or(|old| old.fence < fence));
                    return Ok(Ok(Seen { value: value.to_vec(), fence, trail }));
                }
                Ok(Write::Conflict(found)) => {
                    let found = found.map(Seen::of).transpose()?;
                    return match doubt {
                        None => Ok(Err(found)),
                        Some(why) => settle(old, mark, found, value, trail, why),
                    };
                }
                Err(Error::Unknown(why)) => doubt = Some(why),
                // This try did not happen; one before it may have.
                Err(_) if doubt.is_some() => {}
                Err(error) => return Err(error),
            }
            // The first time at once: the longer we wait, the more is written that pushes ours out of the trail.
            if tries > 0 {
                backoff.wait().await;
            }
        }
        Err(Error::Unknown(doubt.unwrap_or_default()))
    }

    /// Deletes it if `old` is still what is there. `Err`: this is there instead; `None`, nothing.
    pub async fn remove(&self, old: &Seen) -> Result<std::result::Result<(), Option<Seen>>> {
        let inner = &self.keeper.0;
        let mut backoff = Backoff::new(&*inner.clock);
        let mut doubt = None;
        for _ in 0..TRIES {
            match inner.store.delete(&self.key, expect(Some(old))).await {
                Ok(Delete::Deleted) => return Ok(Ok(())),
                // Whoever did it: it is as we wanted it.
                Ok(Delete::Absent) if doubt.is_some() => return Ok(Ok(())),
                Ok(Delete::Absent) => return Ok(Err(None)),
                Ok(Delete::Conflict(found)) => return Ok(Err(Some(Seen::of(found)?))),
                Err(Error::Unknown(why)) => doubt = Some(why),
                Err(_) if doubt.is_some() => {}
                Err(error) => return Err(error),
            }
            backoff.wait().await;
        }
        Err(Error::Unknown(doubt.unwrap_or_default()))
    }
}

fn expect(old: Option<&Seen>) -> Expect {
    old.map_or(Expect::Absent, |seen| Expect::Version(Version(seen.fence.get())))
}

/// An earlier try may have been the one that is in its own way.
fn settle(
    old: Option<&Seen>,
    mark: u64,
    found: Option<Seen>,
    value: &[u8],
    trail: Trail,
    why: String,
) -> Result<Swapped> {
    if let Some(fence) = found.as_ref().and_then(|seen| seen.version_of(mark)) {
        return Ok(Ok(Seen { value: value.to_vec(), fence, trail }));
    }
    match (&found, old) {
        // All that was written since is remembered, and ours is not among it; it cannot come any more.
        (Some(seen), Some(old)) if seen.remembers_since(old.fence) => Ok(Err(found)),
        _ => Err(Error::Unknown(why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(bytes: &[u8], version: u64) -> Seen {
        let key = LockName::new("k").unwrap();
        Seen::of(Record { key, value: bytes.to_vec(), version: Version(version) }).unwrap()
    }

    #[test]
    fn the_trail_remembers_the_last_few_writes_with_their_versions() {
        let mut last: Option<Seen> = None;
        for mark in 1..=50 {
            let bytes = Trail::after(last.as_ref(), mark).before(b"line\nline");
            last = Some(seen(&bytes, mark * 10));
        }
        let last = last.unwrap();
        assert_eq!(last.value, b"line\nline");
        assert_eq!(last.version_of(50).unwrap().get(), 500);
        assert_eq!(last.version_of(18).unwrap().get(), 180);
        assert_eq!(last.version_of(17), None);
        assert!(last.remembers_since(Fence::new(180).unwrap()));
        assert!(!last.remembers_since(Fence::new(170).unwrap()));
        let longest = Trail { newest: u64::MAX, before: vec![(u64::MAX, Fence::MAX.get()); TRAIL] };
        assert!(longest.before(b"").len() <= HEADER);
    }

    #[test]
    fn what_others_wrote_is_all_value() {
        for bytes in [&b""[..], b"lk1", b"lk1 zz\nx", b"lk1 00 1\nx", b"lk1 00 1:x\n", b"lk1 0123", b"\xff\n"]
        {
            assert_eq!(seen(bytes, 7).value, bytes);
        }
    }
}
