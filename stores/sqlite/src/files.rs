//! The files of a store belong together: the database, its log (`-wal`) and the index of the log (`-shm`), in which the
//! locks of SQLite are. SQLite finds them by their names alone. Somebody who deletes or replaces one of them would make
//! it read the log of another database, or let two processes write one log by two indexes.
//!
//! So the files are opened under a lock on their directory that openers share, and made or cleared away only by somebody
//! who has it alone. Which log belongs to which database is noted in `PATH.floor`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Result};
use lockkeeper_host::random_128;
use rustix::fs::{AtFlags, CWD, FlockOperation, StatxFlags, flock, statx};
use rustix::io::Errno;

use crate::busy::patience;
use crate::fault::io_fault;
use crate::floor::Floor;
use crate::place::{Identity, beside, share_like};
use crate::script;

/// A database and its log, each told by its inode and the time at which it was made: an inode is soon used again.
pub(crate) type Pair = [u64; 4];

/// Which files a connection has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Helpers {
    log: Option<Identity>,
    index: Option<Identity>,
}

impl Helpers {
    pub fn of(database: &Path) -> Self {
        let of = |suffix| Identity::of(&beside(database, suffix));
        Helpers { log: of("-wal"), index: of("-shm") }
    }

    /// Only the log is another: whoever has the old one has the only copy of what is not in the database yet.
    pub fn lost_the_log(&self, now: &Helpers) -> bool {
        self.index == now.index && self.log != now.log
    }
}

/// A directory, and when its entries were last changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    directory: Identity,
    changed: (i64, i64),
}

impl Stamp {
    pub fn of(dir: &Path) -> Option<Self> {
        let meta = fs::metadata(dir).ok()?;
        let directory = Identity::new(meta.dev(), meta.ino());
        Some(Stamp { directory, changed: (meta.ctime(), meta.ctime_nsec()) })
    }

    /// Whether a later change shows: the clock of a file system is coarse, so that two changes right after each other
    /// may have one time.
    pub fn is_old(&self) -> bool {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        (now - self.changed.0).abs() > 1
    }
}

/// A turn at the files, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The lock lasts as long as the descriptor.
    _file: File,
}

/// Waits for a turn: shared by those who open what is there, alone for somebody who makes or clears something away.
pub(crate) fn turn(database: &Path, alone: bool) -> Result<Turn> {
    let dir = database.parent().unwrap_or(Path::new("/"));
    let file = File::open(dir).map_err(|e| io_fault("cannot read", dir, &e))?;
    let how = match alone {
        true => FlockOperation::NonBlockingLockExclusive,
        false => FlockOperation::NonBlockingLockShared,
    };
    let mut wait = patience(database);
    for round in 0.. {
        match flock(&file, how) {
            Err(Errno::WOULDBLOCK | Errno::INTR) if wait(round) => {}
            Err(Errno::WOULDBLOCK | Errno::INTR) => break,
            // A file system that knows no such lock is no place for SQLite's locks either, but that is checked there.
            _ => return Ok(Turn { _file: file }),
        }
    }
    Err(Error::Unavailable(format!("another process has been making {} for too long", database.display())))
}

/// Whether all files are there and belong together, as far as is known: then there is nothing to make or clear away.
pub(crate) fn are_whole(database: &Path, floor: &Floor) -> bool {
    let pair = pair(database);
    fs::metadata(database).is_ok_and(|meta| meta.len() > 0)
        && beside(database, "-shm").exists()
        && pair[2] != 0
        && floor.pair() == Some(pair)
}

/// Clears away a log that belongs to another database, and makes the database if there is none. The caller is alone.
pub(crate) fn prepare(database: &Path, floor: &Floor, boot: &str) -> Result<()> {
    let found = pair(database);
    let replaced = floor.pair().is_some_and(|known| known[..2] != found[..2] && known[2..] == found[2..]);
    let empty = fs::metadata(database).map_or(true, |meta| meta.len() == 0);
    if empty || replaced {
        for suffix in ["-wal", "-shm", "-journal"] {
            remove(&beside(database, suffix))?;
        }
    }
    if found[0] == 0 { make(database, boot) } else { Ok(()) }
}

/// What was made by this user is for all who may use the database. The caller is alone, so nobody has been refused yet.
pub(crate) fn share(database: &Path, floor: &Floor) {
    for suffix in ["-wal", "-shm"] {
        share_like(database, &beside(database, suffix));
    }
    floor.set_pair(pair(database));
}

/// Makes the database under another name and puts it in place as a whole, so that nobody finds half of it, and never
/// with a mode that lets others read it: it will hold attempts, which are secrets. Whoever wants to share it makes an
/// empty file, or opens its mode, himself.
fn make(database: &Path, boot: &str) -> Result<()> {
    let number = u64::from_ne_bytes(random_128()[..8].try_into().expect("8 of 16"));
    let new = beside(database, &format!(".new-{number:016x}"));
    let not_made = |e: &io::Error| io_fault("cannot make", database, e);
    let made = (|| {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).map_err(|e| not_made(&e))?;
        script::make(&new, boot).map_err(|e| crate::fault::open_fault(e, database))?;
        fs::rename(&new, database).map_err(|e| not_made(&e))
    })();
    if made.is_err() {
        for suffix in ["", "-wal", "-shm", "-journal"] {
            let _ = fs::remove_file(beside(&new, suffix));
        }
    }
    made
}

fn remove(path: &PathBuf) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_fault("cannot remove", path, &e)),
        _ => Ok(()),
    }
}

/// The database and the log that are there; zeros for one that is not.
pub(crate) fn pair(database: &Path) -> Pair {
    let one = |path: &Path| match statx(CWD, path, AtFlags::empty(), StatxFlags::INO | StatxFlags::BTIME) {
        Ok(found) => {
            let born = found.stx_btime;
            [found.stx_ino, born.tv_sec.unsigned_abs().wrapping_mul(1_000_000_000) + u64::from(born.tv_nsec)]
        }
        Err(_) => [0, 0],
    };
    let ([a, b], [c, d]) = (one(database), one(&beside(database, "-wal")));
    [a, b, c, d]
}
