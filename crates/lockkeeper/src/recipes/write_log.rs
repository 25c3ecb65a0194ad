//! The first line of a recipe's record: the marks of its last writes, and whether the value was removed.
//!
//! A write without a reply may have been applied. So every write carries a random mark, and every value the
//! marks of the writes before it with their versions: a writer whose outcome is unknown looks for its mark
//! there. Without the marks a counter would lose an increment, or count one twice, each time a connection
//! breaks at the wrong moment.
//!
//! ```text
//! lk1 MARK MARK:VERSION MARK:VERSION …⏎       format 1: the newest write first
//! BYTES                                       the caller's value
//!
//! lk0 MARK MARK:VERSION …⏎                    a tombstone: the value was removed by the newest write
//! ```

use std::fmt::Write as _;

use lockkeeper_core::{Error, Fence, Record, Result};

/// The number of writes before the newest that a log has.
const LOG_LENGTH: usize = 32;
/// The most bytes of the log in a record's value.
pub(super) const HEADER_BYTES: usize = 2048;

/// A record as it was read, or as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub value: Vec<u8>,
    /// The version of the write. Versions and fences come from one counter, so a version can be used as a
    /// fence.
    pub fence: Fence,
    /// Whether the value was removed and this is its tombstone.
    pub gone: bool,
    pub(super) log: WriteLog,
}

/// The newest write and the ones before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WriteLog {
    newest: u64,
    earlier: Vec<(u64, u64)>,
}

impl Snapshot {
    /// [`Error::Unsupported`] if the record has a newer format: read as a plain value, it would lose its log with the next write.
    pub fn of(record: Record) -> Result<Snapshot> {
        let fence = Fence::new(record.version.0)?;
        if let Some(format) = newer_format(&record.value) {
            return Err(Error::Unsupported(format!(
                "the record {} has format {format}, and this program reads format 1: upgrade this program",
                record.key
            )));
        }
        Ok(match WriteLog::parse(&record.value) {
            Some((log, gone, length)) => {
                Snapshot { value: record.value[length..].to_vec(), fence, gone, log }
            }
            // A record of another program: all of it is the value.
            None => Snapshot { value: record.value, fence, gone: false, log: WriteLog::default() },
        })
    }

    /// The version of the write with this mark, if the log has it.
    pub fn version_of(&self, mark: u64) -> Option<Fence> {
        if self.log.newest == mark {
            return Some(self.fence);
        }
        let (_, version) = self.log.earlier.iter().find(|(m, _)| *m == mark)?;
        Fence::new(*version).ok()
    }

    /// Whether the log has every write since `fence`.
    pub fn has_all_since(&self, fence: Fence) -> bool {
        self.fence == fence || self.log.earlier.iter().any(|(_, version)| *version == fence.get())
    }

    /// Whether the log has every write since the record was created.
    pub fn has_all(&self) -> bool {
        self.log.earlier.len() < LOG_LENGTH
    }
}

/// The number in a first line `lkN MARK` with N above 1.
fn newer_format(value: &[u8]) -> Option<u64> {
    let (format, rest) = std::str::from_utf8(value.get(..40.min(value.len()))?)
        .unwrap_or_default()
        .strip_prefix("lk")?
        .split_once(' ')?;
    let has_mark = rest.len() >= 16 && rest.bytes().take(16).all(|byte| byte.is_ascii_hexdigit());
    format.parse().ok().filter(|format| has_mark && *format > 1)
}

impl WriteLog {
    pub fn after(old: Option<&Snapshot>, mark: u64) -> WriteLog {
        let last = old.map(|seen| (seen.log.newest, seen.fence.get()));
        let older = old.map_or(&[][..], |snapshot| &snapshot.log.earlier);
        WriteLog {
            newest: mark,
            earlier: last.into_iter().chain(older.iter().copied()).take(LOG_LENGTH).collect(),
        }
    }

    /// The bytes of a record: this log, then `value`. `None` encodes a tombstone.
    pub fn encode(&self, value: Option<&[u8]>) -> Vec<u8> {
        let word = if value.is_some() { "lk1" } else { "lk0" };
        let mut line = format!("{word} {:016x}", self.newest);
        for (mark, version) in &self.earlier {
            let _ = write!(line, " {mark:016x}:{version}");
        }
        debug_assert!(line.len() < HEADER_BYTES);
        [line.as_bytes(), b"\n", value.unwrap_or_default()].concat()
    }

    /// The log at the beginning of `value`, whether it is a tombstone's, and its length.
    fn parse(value: &[u8]) -> Option<(WriteLog, bool, usize)> {
        let end = value.iter().take(HEADER_BYTES).position(|b| *b == b'\n')?;
        let line = std::str::from_utf8(&value[..end]).ok()?;
        let (line, gone) = match line.strip_prefix("lk1 ") {
            Some(line) => (line, false),
            None => (line.strip_prefix("lk0 ")?, true),
        };
        let mut words = line.split(' ');
        let newest = u64::from_str_radix(words.next()?, 16).ok()?;
        let parse_earlier = |word: &str| {
            let (mark, version) = word.split_once(':')?;
            Some((u64::from_str_radix(mark, 16).ok()?, version.parse().ok()?))
        };
        Some((WriteLog { newest, earlier: words.map(parse_earlier).collect::<Option<_>>()? }, gone, end + 1))
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::{LockName, Version};

    use super::*;

    fn snapshot(bytes: &[u8], version: u64) -> Snapshot {
        let key = LockName::new("k").unwrap();
        Snapshot::of(Record { key, value: bytes.to_vec(), version: Version(version) }).unwrap()
    }

    #[test]
    fn the_log_has_the_last_writes_with_their_versions() {
        let mut last: Option<Snapshot> = None;
        for mark in 1..=50 {
            let bytes = WriteLog::after(last.as_ref(), mark).encode(Some(b"line\nline"));
            last = Some(snapshot(&bytes, mark * 10));
            assert_eq!(last.as_ref().unwrap().has_all(), mark <= LOG_LENGTH as u64);
        }
        let last = last.unwrap();
        assert_eq!((&last.value[..], last.gone), (&b"line\nline"[..], false));
        assert_eq!(last.version_of(50).unwrap().get(), 500);
        assert_eq!(last.version_of(18).unwrap().get(), 180);
        assert_eq!(last.version_of(17), None);
        assert!(last.has_all_since(Fence::new(180).unwrap()));
        assert!(!last.has_all_since(Fence::new(170).unwrap()));
        let longest = WriteLog { newest: u64::MAX, earlier: vec![(u64::MAX, Fence::MAX.get()); LOG_LENGTH] };
        assert!(longest.encode(None).len() <= HEADER_BYTES);
    }

    #[test]
    fn a_tombstone_has_the_log_too() {
        let live = snapshot(&WriteLog::after(None, 7).encode(Some(b"x")), 70);
        let gone = snapshot(&WriteLog::after(Some(&live), 8).encode(None), 80);
        assert!(gone.gone && gone.value.is_empty());
        assert_eq!(gone.version_of(7).unwrap().get(), 70);
        let again = snapshot(&WriteLog::after(Some(&gone), 9).encode(Some(b"")), 90);
        assert!(!again.gone && again.version_of(8).unwrap().get() == 80);
    }

    #[test]
    fn a_record_of_a_newer_format_is_refused() {
        let key = LockName::new("k").unwrap();
        let read = |value: &[u8]| {
            Snapshot::of(Record { key: key.clone(), value: value.to_vec(), version: Version(7) })
        };
        let newer = read(b"lk2 00000000000000ff gone\nvalue");
        assert!(matches!(&newer, Err(Error::Unsupported(why)) if why.contains("format 2")), "{newer:?}");
        assert!(read(b"lk2 is my favourite lock\n").is_ok(), "text without a mark is a value");
    }

    #[test]
    fn a_record_of_another_program_is_all_value() {
        for bytes in
            [&b""[..], b"lk1", b"lk1 zz\nx", b"lk1 00 1\nx", b"lk1 00 1:x\n", b"lk0", b"lk2 00\n", b"\xff\n"]
        {
            assert_eq!((&snapshot(bytes, 7).value[..], snapshot(bytes, 7).gone), (bytes, false));
        }
    }
}
