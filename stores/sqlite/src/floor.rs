//! The floor of fences: a number in a file of its own, beside the database, so that a database that was deleted or
//! restored from an old copy does not hand out an old fence again, even if the wall clock went back too.
//!
//! The number is reserved ahead of the fences: it is written and synced before the transaction that needs it commits,
//! about once in [`AHEAD`] microseconds of fences, and never again in between.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Fence, Result};

use crate::fault::io_fault;
use crate::place::{beside, share_like};

/// How far ahead of the newest fence the floor is kept: a minute's worth of microseconds. More of it would move fences
/// further ahead of the wall clock after a loss, and a move to another store relies on that clock.
const AHEAD: u64 = 60_000_000;

/// Two copies, a disk sector apart: a torn write spoils one of them.
const SLOTS: [u64; 2] = [0, 512];
const LINE: usize = 34;

#[derive(Clone, Debug)]
pub(crate) struct Floor {
    database: PathBuf,
    path: PathBuf,
}

impl Floor {
    pub fn beside(database: &Path) -> Self {
        Floor { database: database.to_owned(), path: beside(database, ".floor") }
    }

    pub fn exists(&self) -> bool {
        self.path.exists()
    }

    /// The reserved number; `None` if there is none, or none that can be read.
    pub fn read(&self) -> Result<Option<u64>> {
        match File::open(&self.path) {
            Ok(file) => Ok(SLOTS.iter().filter_map(|at| slot(&file, *at)).max()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_fault("cannot read", &self.path, &e)),
        }
    }

    /// Reserves ahead of `fence`, durably, and returns the reserved number. The caller holds the database's write lock:
    /// nobody else writes here at the same time.
    pub fn reserve(&self, fence: Fence) -> Result<u64> {
        let reserved = (fence.get() + AHEAD).min(Fence::MAX.get());
        self.write(reserved).map_err(|e| match io_fault("cannot write", &self.path, &e) {
            // Until the commit nothing has happened.
            Error::Unavailable(_) if e.kind() == io::ErrorKind::StorageFull => {
                Error::Unavailable("the disk is full".into())
            }
            other => other,
        })?;
        Ok(reserved)
    }

    fn write(&self, number: u64) -> io::Result<()> {
        let line = format!("{number:016x} {:016x}\n", check(number));
        debug_assert_eq!(line.len(), LINE);
        match OpenOptions::new().read(true).write(true).open(&self.path) {
            Ok(file) => {
                let [a, b] = SLOTS.map(|at| slot(&file, at).unwrap_or(0));
                file.write_all_at(line.as_bytes(), if a <= b { SLOTS[0] } else { SLOTS[1] })?;
                file.sync_data()
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.create(&line),
            Err(e) => Err(e),
        }
    }

    fn create(&self, line: &str) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path)?;
        let mut blank = [b' '; 1024];
        blank[..LINE].copy_from_slice(line.as_bytes());
        blank[1023] = b'\n';
        file.write_all_at(&blank, 0)?;
        file.sync_all()?;
        share_like(&self.database, &self.path);
        // The name of a new file is in its directory, which has to be synced as well.
        File::open(self.path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

fn slot(file: &File, at: u64) -> Option<u64> {
    let mut line = [0; LINE];
    file.read_exact_at(&mut line, at).ok()?;
    let text = std::str::from_utf8(&line).ok()?;
    let (number, sum) = text.trim_end().split_once(' ')?;
    let number = u64::from_str_radix(number, 16).ok()?;
    (u64::from_str_radix(sum, 16).ok()? == check(number)).then_some(number)
}

/// FNV-1a: enough to tell a torn line from a whole one.
fn check(number: u64) -> u64 {
    number
        .to_be_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_write_leaves_the_older_number() {
        let dir = std::env::temp_dir().join(format!("lockkeeper-floor-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let floor = Floor::beside(&dir.join("db"));
        assert_eq!(floor.read().unwrap(), None);
        let one = floor.reserve(Fence::new(1).unwrap()).unwrap();
        assert_eq!(floor.read().unwrap(), Some(one));
        let two = floor.reserve(Fence::new(one).unwrap()).unwrap();
        assert_eq!(floor.read().unwrap(), Some(two));
        OpenOptions::new().write(true).open(&floor.path).unwrap().write_all_at(b"torn", SLOTS[1]).unwrap();
        assert_eq!(floor.read().unwrap(), Some(one));
        let again = floor.reserve(Fence::new(two).unwrap()).unwrap();
        assert_eq!(floor.read().unwrap(), Some(again));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
