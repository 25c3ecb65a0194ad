//! The fence floor: a lower bound for new fences in a file of its own (`PATH.floor`), so that a deleted database, or one
//! that was restored from an old copy, does not repeat a fence, even if the wall clock has gone back too.
//!
//! The store reserves numbers ahead of the fences: it writes and syncs the reserved number before the transaction that
//! needs it commits, about once in [`AHEAD`] microseconds of fences. A copy of the database that is younger than that knows
//! the reserved number. So the file also has the newest fence, which the store writes each time and does not sync. A crash
//! of the machine may lose it; then fences continue from the reserved number.

use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Fence, Result, WallTime};

use crate::db_path::{FileId, FilePair, beside, file_pair, share_like};
use crate::error::io_error;

/// How far ahead of the wall clock the store reserves: a minute in microseconds. A larger number would move fences further
/// ahead of that clock after a loss, and a migration to another store relies on that clock.
const AHEAD: u64 = 60_000_000;
/// How far ahead of the newest fence the store reserves if that fence is ahead of the wall clock: a machine that restarts
/// often does not gain a minute each time.
const SPARE: u64 = 1_000_000;

/// Two copies of the reserved number, a disk sector apart: a torn write damages one of them.
const SLOTS: [u64; 2] = [0, 512];
/// The offset of the newest fence.
const LATEST: u64 = 1024;
/// The offset of the [`FilePair`]: which log belongs to which database.
const PAIR: u64 = 1536;
const SIZE: usize = 2048;
/// The length of a number with its checksum.
const LINE: usize = 34;
/// The last bytes of the file: the version of this format. A file that is shorter is older, and has the same numbers.
const VERSION: &[u8; 3] = b"v1\n";

/// The numbers in the file; zero if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FloorValues {
    /// No fence that a caller has seen is greater.
    pub reserved: u64,
    /// The newest fence, unless a crash of the machine has lost it.
    pub latest: u64,
}

#[derive(Debug)]
pub(crate) struct FenceFloor {
    database: PathBuf,
    path: PathBuf,
    /// The open file, as long as the path leads to it.
    file: RefCell<Option<(FileId, File)>>,
}

impl FenceFloor {
    pub fn beside(database: &Path) -> Self {
        let path = beside(database, ".floor");
        FenceFloor { database: database.to_owned(), path, file: RefCell::new(None) }
    }

    pub fn exists(&self) -> bool {
        self.path.exists()
    }

    /// The reserved number and the newest fence.
    pub fn read(&self) -> Result<FloorValues> {
        let read = |file: &File| {
            let mut bytes = [0; SIZE];
            let mut filled = 0;
            // A file of an older Lockkeeper is shorter.
            while filled < bytes.len() {
                match file.read_at(&mut bytes[filled..], filled as u64)? {
                    0 => break,
                    more => filled += more,
                }
            }
            let slot = |at: u64| parse(&bytes[at as usize..][..LINE]).unwrap_or(0);
            Ok(FloorValues { reserved: slot(SLOTS[0]).max(slot(SLOTS[1])), latest: slot(LATEST) })
        };
        match self.with_file(read) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(FloorValues::default()),
            other => other.map_err(|e| self.error("cannot read", &e)),
        }
    }

    /// Reserves ahead of `fence`, durably, and returns the reserved number. The caller has the write lock of the database,
    /// so no other process writes the file at the same time.
    pub fn reserve(&self, fence: Fence, wall: WallTime) -> Result<u64> {
        let reserved = wall.as_micros().saturating_add(AHEAD).max(fence.get() + SPARE).min(Fence::MAX.get());
        let line = line(reserved);
        let written = self.with_file(|file| {
            let [a, b] = SLOTS.map(|at| slot(file, at).unwrap_or(0));
            file.write_all_at(&line, if a <= b { SLOTS[0] } else { SLOTS[1] })?;
            file.sync_data()
        });
        match written {
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.create(&line),
            other => other,
        }
        .map_err(|e| self.error("cannot write", &e))?;
        Ok(reserved)
    }

    /// Writes the newest fence before its transaction commits. Not synced.
    pub fn write_latest(&self, fence: Fence) -> Result<()> {
        // The transaction has read the file, so it need not check again that the path leads to it.
        let noted = match &*self.file.borrow() {
            Some((_, file)) => file.write_all_at(&line(fence.get()), LATEST),
            None => return Ok(()),
        };
        noted.map_err(|e| self.error("cannot write", &e))
    }

    /// The recorded database and log.
    pub fn pair(&self) -> Option<FilePair> {
        let mut bytes = [0; 85];
        self.with_file(|file| file.read_exact_at(&mut bytes, PAIR)).ok()?;
        let mut words = std::str::from_utf8(&bytes).ok()?.split_whitespace();
        let mut number = || u64::from_str_radix(words.next()?, 16).ok();
        let pair = [number()?, number()?, number()?, number()?];
        (number()? == checksum_of(&pair)).then_some(pair)
    }

    /// Records which log belongs to which database, if the file exists.
    pub fn set_pair(&self, pair: FilePair) {
        let _ = self.with_file(|file| file.write_all_at(pair_text(pair).as_bytes(), PAIR));
    }

    /// An error before the commit: the request had no effect.
    fn error(&self, what: &str, e: &io::Error) -> Error {
        match io_error(what, &self.path, e) {
            Error::Unavailable(_) if e.kind() == io::ErrorKind::StorageFull => {
                Error::Unavailable("the disk is full".into())
            }
            other => other,
        }
    }

    fn with_file<T>(&self, work: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let mut open = self.file.borrow_mut();
        let meta = fs::metadata(&self.path)?;
        let here = FileId::new(meta.dev(), meta.ino());
        if open.as_ref().is_none_or(|(known, _)| *known != here) {
            let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
            let meta = file.metadata()?;
            *open = Some((FileId::new(meta.dev(), meta.ino()), file));
        }
        work(&open.as_ref().expect("just opened").1)
    }

    fn create(&self, line: &[u8]) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path)?;
        let mut blank = [b' '; SIZE];
        blank[..LINE].copy_from_slice(line);
        let pair = pair_text(file_pair(&self.database));
        blank[PAIR as usize..][..pair.len()].copy_from_slice(pair.as_bytes());
        blank[SIZE - VERSION.len()..].copy_from_slice(VERSION);
        file.write_all_at(&blank, 0)?;
        file.sync_all()?;
        share_like(&self.database, &self.path);
        // The directory has the name of the new file, so it has to be synced too.
        *self.file.borrow_mut() = None;
        File::open(self.path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

fn pair_text(pair: FilePair) -> String {
    let [a, b, c, d] = pair;
    format!("{a:016x} {b:016x} {c:016x} {d:016x} {:016x}\n", checksum_of(&pair))
}

fn line(number: u64) -> [u8; LINE] {
    let text = format!("{number:016x} {:016x}\n", checksum(number));
    text.as_bytes().try_into().expect("two numbers of 16 digits")
}

fn slot(file: &File, at: u64) -> Option<u64> {
    let mut line = [0; LINE];
    file.read_exact_at(&mut line, at).ok()?;
    parse(&line)
}

fn parse(line: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(line).ok()?;
    let (number, sum) = text.trim_end().split_once(' ')?;
    let number = u64::from_str_radix(number, 16).ok()?;
    (u64::from_str_radix(sum, 16).ok()? == checksum(number)).then_some(number)
}

/// FNV-1a: enough to detect a torn write.
fn checksum_of(numbers: &[u64]) -> u64 {
    let bytes = numbers.iter().flat_map(|number| number.to_be_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

fn checksum(number: u64) -> u64 {
    checksum_of(&[number])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_write_keeps_the_older_number() {
        let dir = std::env::temp_dir().join(format!("lockkeeper-floor-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let floor = FenceFloor::beside(&dir.join("db"));
        let reserve = |fence| floor.reserve(Fence::new(fence).unwrap(), WallTime::from_micros(1)).unwrap();
        let reserved = || floor.read().unwrap().reserved;
        assert_eq!(floor.read().unwrap(), FloorValues::default());
        let one = reserve(1);
        assert_eq!((one, reserved()), (AHEAD + 1, one));
        let two = reserve(one);
        assert_eq!((two, reserved()), (one + SPARE, two), "fences run away from the wall clock");
        floor.write_latest(Fence::new(7).unwrap()).unwrap();
        assert_eq!(floor.read().unwrap(), FloorValues { reserved: two, latest: 7 });
        OpenOptions::new().write(true).open(&floor.path).unwrap().write_all_at(b"torn", SLOTS[1]).unwrap();
        assert_eq!(reserved(), one);
        let again = reserve(two);
        assert_eq!(reserved(), again);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// Writes the same numbers and the same pair as the program that wrote `tests/golden/floor-v1`, and reads them from that file. If
    /// this fails, the format has changed: raise [`VERSION`], and keep the fixture, because a file of an older format must still be read.
    #[test]
    fn the_golden_floor_is_read_and_written() {
        let golden = include_bytes!("../tests/golden/floor-v1");
        let dir = std::env::temp_dir().join(format!("lockkeeper-golden-floor-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let pair = [1, 2, 3, 4];
        let written = FenceFloor::beside(&dir.join("written"));
        for fence in [1_700_000_000_000_000, 1_700_000_000_500_000] {
            written.reserve(Fence::new(fence).unwrap(), WallTime::from_micros(fence)).unwrap();
        }
        // Only a transaction that has read the file writes the newest fence.
        written.read().unwrap();
        written.write_latest(Fence::new(1_700_000_000_500_001).unwrap()).unwrap();
        written.set_pair(pair);
        if std::env::var_os("LOCKKEEPER_WRITE_GOLDEN").is_some() {
            std::fs::copy(&written.path, "tests/golden/floor-v1").unwrap();
        }
        assert!(std::fs::read(&written.path).unwrap() == golden, "the stored bytes have changed");
        let values = FloorValues { reserved: 1_700_000_060_500_000, latest: 1_700_000_000_500_001 };
        for (file, length, latest, found) in [
            ("read", golden.len(), values.latest, Some(pair)),
            // A file from before the version, the pair and the newest fence has the reserved number.
            ("short", LATEST as usize, 0, None),
        ] {
            let read = FenceFloor::beside(&dir.join(file));
            std::fs::write(&read.path, &golden[..length]).unwrap();
            assert_eq!(read.read().unwrap(), FloorValues { latest, ..values }, "{file}");
            assert_eq!(read.pair(), found, "{file}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
