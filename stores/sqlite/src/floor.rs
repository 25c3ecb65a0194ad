//! The floor of fences: a number in a file of its own, beside the database, so that a database that was deleted or
//! restored from an old copy does not hand out an old fence again, even if the wall clock went back too.
//!
//! The number is reserved ahead of the fences: it is written and synced before the transaction that needs it commits,
//! about once in [`AHEAD`] microseconds of fences, and never again in between. A copy of the database that is younger
//! than that knows of it too; so the newest fence stands beside it, written each time and not synced. After a restart of
//! the machine it may be forgotten, and then fences go on from the number that was reserved.

use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Fence, Result, Wall};

use crate::fault::io_fault;
use crate::files::{self, Pair};
use crate::place::{Identity, beside, share_like};

/// How far ahead of the wall clock the floor is kept: a minute's worth of microseconds. More of it would move fences
/// further ahead of that clock after a loss, and a move to another store relies on it.
const AHEAD: u64 = 60_000_000;
/// How far ahead of the newest fence, if that is ahead of the wall clock already: so a machine that restarts again and
/// again does not gain a minute each time.
const SPARE: u64 = 1_000_000;

/// Two copies of the reserved number, a disk sector apart: a torn write spoils one of them.
const SLOTS: [u64; 2] = [0, 512];
/// Where the newest fence stands.
const LATEST: u64 = 1024;
/// Where it stands which log belongs to which database.
const PAIR: u64 = 1536;
const SIZE: usize = 2048;
const LINE: usize = 34;

/// What the file says; zero is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// No fence that was ever told is greater.
    pub reserved: u64,
    /// The newest fence, unless a crash of the machine forgot it.
    pub latest: u64,
}

#[derive(Debug)]
pub(crate) struct Floor {
    database: PathBuf,
    path: PathBuf,
    /// Kept open, as long as the path leads to it.
    file: RefCell<Option<(Identity, File)>>,
}

impl Floor {
    pub fn beside(database: &Path) -> Self {
        let path = beside(database, ".floor");
        Floor { database: database.to_owned(), path, file: RefCell::new(None) }
    }

    pub fn exists(&self) -> bool {
        self.path.exists()
    }

    /// What was reserved, and what is the newest fence.
    pub fn read(&self) -> Result<Marks> {
        let read = |file: &File| {
            let mut bytes = [0; LATEST as usize + LINE];
            let mut filled = 0;
            // A file of an older version is shorter.
            while filled < bytes.len() {
                match file.read_at(&mut bytes[filled..], filled as u64)? {
                    0 => break,
                    more => filled += more,
                }
            }
            let slot = |at: u64| parse(&bytes[at as usize..][..LINE]).unwrap_or(0);
            Ok(Marks { reserved: slot(SLOTS[0]).max(slot(SLOTS[1])), latest: slot(LATEST) })
        };
        match self.with_file(read) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Marks::default()),
            other => other.map_err(|e| self.fault("cannot read", &e)),
        }
    }

    /// Reserves ahead of `fence`, durably, and returns the reserved number. The caller holds the database's write lock:
    /// nobody else writes here at the same time.
    pub fn reserve(&self, fence: Fence, wall: Wall) -> Result<u64> {
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
        .map_err(|e| self.fault("cannot write", &e))?;
        Ok(reserved)
    }

    /// Notes the newest fence, before its transaction commits. Not synced.
    pub fn note(&self, fence: Fence) -> Result<()> {
        // It was read just before: there is no need to look whether it is the same file.
        let noted = match &*self.file.borrow() {
            Some((_, file)) => file.write_all_at(&line(fence.get()), LATEST),
            None => return Ok(()),
        };
        noted.map_err(|e| self.fault("cannot write", &e))
    }

    /// Which log belongs to which database.
    pub fn pair(&self) -> Option<Pair> {
        let mut bytes = [0; 85];
        self.with_file(|file| file.read_exact_at(&mut bytes, PAIR)).ok()?;
        let mut words = std::str::from_utf8(&bytes).ok()?.split_whitespace();
        let mut number = || u64::from_str_radix(words.next()?, 16).ok();
        let pair = [number()?, number()?, number()?, number()?];
        (number()? == sum(&pair)).then_some(pair)
    }

    /// Notes which log belongs to which database, if there is anything to lose yet.
    pub fn set_pair(&self, pair: Pair) {
        let _ = self.with_file(|file| file.write_all_at(pair_text(pair).as_bytes(), PAIR));
    }

    /// Until the commit nothing has happened.
    fn fault(&self, what: &str, e: &io::Error) -> Error {
        match io_fault(what, &self.path, e) {
            Error::Unavailable(_) if e.kind() == io::ErrorKind::StorageFull => {
                Error::Unavailable("the disk is full".into())
            }
            other => other,
        }
    }

    fn with_file<T>(&self, work: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        let mut open = self.file.borrow_mut();
        let meta = fs::metadata(&self.path)?;
        let here = Identity::new(meta.dev(), meta.ino());
        if open.as_ref().is_none_or(|(known, _)| *known != here) {
            let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
            let meta = file.metadata()?;
            *open = Some((Identity::new(meta.dev(), meta.ino()), file));
        }
        work(&open.as_ref().expect("just opened").1)
    }

    fn create(&self, line: &[u8]) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path)?;
        let mut blank = [b' '; SIZE];
        blank[..LINE].copy_from_slice(line);
        let pair = pair_text(files::pair(&self.database));
        blank[PAIR as usize..][..pair.len()].copy_from_slice(pair.as_bytes());
        blank[SIZE - 1] = b'\n';
        file.write_all_at(&blank, 0)?;
        file.sync_all()?;
        share_like(&self.database, &self.path);
        // The name of a new file is in its directory, which has to be synced as well.
        *self.file.borrow_mut() = None;
        File::open(self.path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

fn pair_text(pair: Pair) -> String {
    let [a, b, c, d] = pair;
    format!("{a:016x} {b:016x} {c:016x} {d:016x} {:016x}\n", sum(&pair))
}

fn line(number: u64) -> [u8; LINE] {
    let text = format!("{number:016x} {:016x}\n", check(number));
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
    (u64::from_str_radix(sum, 16).ok()? == check(number)).then_some(number)
}

/// FNV-1a: enough to tell a torn line from a whole one.
fn sum(numbers: &[u64]) -> u64 {
    let bytes = numbers.iter().flat_map(|number| number.to_be_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

fn check(number: u64) -> u64 {
    sum(&[number])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_write_leaves_the_older_number() {
        let dir = std::env::temp_dir().join(format!("lockkeeper-floor-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let floor = Floor::beside(&dir.join("db"));
        let reserve = |fence| floor.reserve(Fence::new(fence).unwrap(), Wall::from_micros(1)).unwrap();
        let reserved = || floor.read().unwrap().reserved;
        assert_eq!(floor.read().unwrap(), Marks::default());
        let one = reserve(1);
        assert_eq!((one, reserved()), (AHEAD + 1, one));
        let two = reserve(one);
        assert_eq!((two, reserved()), (one + SPARE, two), "fences run away from the wall clock");
        floor.note(Fence::new(7).unwrap()).unwrap();
        assert_eq!(floor.read().unwrap(), Marks { reserved: two, latest: 7 });
        OpenOptions::new().write(true).open(&floor.path).unwrap().write_all_at(b"torn", SLOTS[1]).unwrap();
        assert_eq!(reserved(), one);
        let again = reserve(two);
        assert_eq!(reserved(), again);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
