//! The first line of a recipe's record: the marks of its last writes, and whether the value was removed.
//!
//! A write without a reply may have been applied. So every write carries a mark of its own, and every value the marks of
//! the writes before it, with their versions: a writer with an unknown outcome finds its mark there. Without the marks a
//! counter would lose an increment, or count one twice, each time a connection breaks at the wrong moment.
//!
//! ```text
//! lk1 MARK MARK:VERSION MARK:VERSION …⏎       the newest write first
//! anything                                    the user's value
//!
//! lk0 MARK MARK:VERSION …⏎                    a tombstone: the value was removed by the newest write
//! ```

use std::fmt::Write as _;

use lockkeeper_core::{Fence, Record, Result};

/// The number of writes before the newest that a record remembers.
const TRAIL: usize = 32;
/// The most bytes that the trail takes of a record's value.
pub(super) const HEADER: usize = 2048;

/// A record as it was read, or as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub value: Vec<u8>,
    /// The version of the write. Versions and fences come from one counter, so it can stand where a fence can.
    pub fence: Fence,
    /// The value was removed; only its tombstone is left.
    pub gone: bool,
    pub(super) trail: Trail,
}

/// The newest write and the ones before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Trail {
    newest: u64,
    before: Vec<(u64, u64)>,
}

impl Seen {
    pub fn of(record: Record) -> Result<Seen> {
        let fence = Fence::new(record.version.0)?;
        Ok(match Trail::parse(&record.value) {
            Some((trail, gone, length)) => {
                Seen { value: record.value[length..].to_vec(), fence, gone, trail }
            }
            // Another program's record: all of it is the value.
            None => Seen { value: record.value, fence, gone: false, trail: Trail::default() },
        })
    }

    /// The version of the write with this mark, if it was one of the last few.
    pub fn version_of(&self, mark: u64) -> Option<Fence> {
        if self.trail.newest == mark {
            return Some(self.fence);
        }
        let (_, version) = self.trail.before.iter().find(|(m, _)| *m == mark)?;
        Fence::new(*version).ok()
    }

    /// Whether every write since `fence` is remembered here.
    pub fn remembers_since(&self, fence: Fence) -> bool {
        self.fence == fence || self.trail.before.iter().any(|(_, version)| *version == fence.get())
    }

    /// Whether every write since the record was made is remembered here.
    pub fn remembers_all(&self) -> bool {
        self.trail.before.len() < TRAIL
    }
}

impl Trail {
    pub fn after(old: Option<&Seen>, mark: u64) -> Trail {
        let last = old.map(|seen| (seen.trail.newest, seen.fence.get()));
        let older = old.map_or(&[][..], |seen| &seen.trail.before);
        Trail { newest: mark, before: last.into_iter().chain(older.iter().copied()).take(TRAIL).collect() }
    }

    /// The bytes of a record: this trail, then `value`, or nothing of a tombstone.
    pub fn before(&self, value: Option<&[u8]>) -> Vec<u8> {
        let word = if value.is_some() { "lk1" } else { "lk0" };
        let mut line = format!("{word} {:016x}", self.newest);
        for (mark, version) in &self.before {
            let _ = write!(line, " {mark:016x}:{version}");
        }
        debug_assert!(line.len() < HEADER);
        [line.as_bytes(), b"\n", value.unwrap_or_default()].concat()
    }

    /// The trail at the beginning of `value`, whether it is that of a tombstone, and its length.
    fn parse(value: &[u8]) -> Option<(Trail, bool, usize)> {
        let end = value.iter().take(HEADER).position(|b| *b == b'\n')?;
        let line = std::str::from_utf8(&value[..end]).ok()?;
        let (line, gone) = match line.strip_prefix("lk1 ") {
            Some(line) => (line, false),
            None => (line.strip_prefix("lk0 ")?, true),
        };
        let mut words = line.split(' ');
        let newest = u64::from_str_radix(words.next()?, 16).ok()?;
        let earlier = |word: &str| {
            let (mark, version) = word.split_once(':')?;
            Some((u64::from_str_radix(mark, 16).ok()?, version.parse().ok()?))
        };
        Some((Trail { newest, before: words.map(earlier).collect::<Option<_>>()? }, gone, end + 1))
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::{LockName, Version};

    use super::*;

    fn seen(bytes: &[u8], version: u64) -> Seen {
        let key = LockName::new("k").unwrap();
        Seen::of(Record { key, value: bytes.to_vec(), version: Version(version) }).unwrap()
    }

    #[test]
    fn the_trail_remembers_the_last_few_writes_with_their_versions() {
        let mut last: Option<Seen> = None;
        for mark in 1..=50 {
            let bytes = Trail::after(last.as_ref(), mark).before(Some(b"line\nline"));
            last = Some(seen(&bytes, mark * 10));
            assert_eq!(last.as_ref().unwrap().remembers_all(), mark <= TRAIL as u64);
        }
        let last = last.unwrap();
        assert_eq!((&last.value[..], last.gone), (&b"line\nline"[..], false));
        assert_eq!(last.version_of(50).unwrap().get(), 500);
        assert_eq!(last.version_of(18).unwrap().get(), 180);
        assert_eq!(last.version_of(17), None);
        assert!(last.remembers_since(Fence::new(180).unwrap()));
        assert!(!last.remembers_since(Fence::new(170).unwrap()));
        let longest = Trail { newest: u64::MAX, before: vec![(u64::MAX, Fence::MAX.get()); TRAIL] };
        assert!(longest.before(None).len() <= HEADER);
    }

    #[test]
    fn a_tombstone_remembers_as_well() {
        let live = seen(&Trail::after(None, 7).before(Some(b"x")), 70);
        let gone = seen(&Trail::after(Some(&live), 8).before(None), 80);
        assert!(gone.gone && gone.value.is_empty());
        assert_eq!(gone.version_of(7).unwrap().get(), 70);
        let again = seen(&Trail::after(Some(&gone), 9).before(Some(b"")), 90);
        assert!(!again.gone && again.version_of(8).unwrap().get() == 80);
    }

    #[test]
    fn what_others_wrote_is_all_value() {
        for bytes in
            [&b""[..], b"lk1", b"lk1 zz\nx", b"lk1 00 1\nx", b"lk1 00 1:x\n", b"lk0", b"lk2 00\n", b"\xff\n"]
        {
            assert_eq!((&seen(bytes, 7).value[..], seen(bytes, 7).gone), (bytes, false));
        }
    }
}
