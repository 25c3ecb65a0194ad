//! The files of a store: the database, its log (`-wal`) and the index of the log (`-shm`), which has SQLite's file locks.
//!
//! SQLite finds the files by their names alone. If a user deletes or replaces one of them, SQLite may read the log of
//! another database, or two processes may write one log with two indexes. So processes open the files under a shared lock
//! on their directory, and create or remove them under an exclusive one. A process that finds a file missing waits until no
//! connection has the database open, and only then creates another. `PATH.floor` records which log belongs to which database.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use lockkeeper_host::random_128;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::busy_handler::busy_handler;
use crate::db_path::{FileId, FilePair, beside, file_pair, share_like};
use crate::error::{io_error, open_error};
use crate::fence_floor::FenceFloor;
use crate::statements;

/// The log and the index that a connection has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalFiles {
    pub log: Option<FileId>,
    index: Option<FileId>,
}

impl WalFiles {
    pub fn of(database: &Path) -> Self {
        let of = |suffix| FileId::of(&beside(database, suffix));
        WalFiles { log: of("-wal"), index: of("-shm") }
    }

    /// Whether both files were there.
    pub fn exist(&self) -> bool {
        self.log.is_some() && self.index.is_some()
    }

    /// Whether the log was deleted, and the index is the same or was deleted too: then the open log is the only copy of
    /// commits that are not in the database yet.
    pub fn has_lost_log(&self, now: &WalFiles) -> bool {
        self.log != now.log && (now.index == self.index || now.index.is_none())
    }
}

/// A directory, and the time of the last change of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirStamp {
    directory: FileId,
    changed: (i64, i64),
}

impl DirStamp {
    pub fn of(dir: &Path) -> Option<Self> {
        let meta = fs::metadata(dir).ok()?;
        let directory = FileId::new(meta.dev(), meta.ino());
        Some(DirStamp { directory, changed: (meta.ctime(), meta.ctime_nsec()) })
    }

    /// Whether a later change would have a later time. The clock of a file system is coarse: two changes in a row may have
    /// the same time.
    pub fn is_old(&self) -> bool {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        (now - self.changed.0).abs() > 1
    }
}

/// A lock on the directory of the files, until it is dropped.
#[derive(Debug)]
pub(crate) struct DirLock {
    /// The lock lasts as long as the descriptor.
    _file: File,
}

/// Waits for the lock on the directory: shared to open the files, exclusive to create or remove them.
pub(crate) fn lock_directory(database: &Path, exclusive: bool) -> Result<DirLock> {
    let dir = database.parent().unwrap_or(Path::new("/"));
    let file = File::open(dir).map_err(|e| io_error("cannot read", dir, &e))?;
    let how = match exclusive {
        true => FlockOperation::NonBlockingLockExclusive,
        false => FlockOperation::NonBlockingLockShared,
    };
    let mut wait = busy_handler(database);
    for round in 0.. {
        match flock(&file, how) {
            Err(Errno::WOULDBLOCK | Errno::INTR) if wait(round) => {}
            Err(Errno::WOULDBLOCK | Errno::INTR) => break,
            // Without support for this lock SQLite's own locks fail too, and SQLite reports that.
            _ => return Ok(DirLock { _file: file }),
        }
    }
    Err(Error::Unavailable(format!("another process has been creating {} for too long", database.display())))
}

/// Whether all files exist and belong together: then there is nothing to create or remove.
pub(crate) fn are_complete(database: &Path, floor: &FenceFloor) -> bool {
    let pair = file_pair(database);
    fs::metadata(database).is_ok_and(|meta| meta.len() > 0)
        && beside(database, "-shm").exists()
        && pair[2] != 0
        && floor.pair() == Some(pair)
}

/// Whether the log or its index is missing, or the log is not the recorded one: a user must have deleted a file, and other
/// processes may have it open.
pub(crate) fn has_lost_files(database: &Path, floor: &FenceFloor) -> bool {
    let found = file_pair(database);
    let another = |known: FilePair| known[..2] == found[..2] && known[2..] != found[2..];
    found[2] == 0 || !beside(database, "-shm").exists() || floor.pair().is_some_and(another)
}

/// Whether any connection, of this process or another, has the database open. Every connection to a database with a log keeps
/// a shared lock on the database until it is closed, and exclusive mode needs the exclusive lock. In that mode SQLite has
/// the index in its own memory, so this changes no file.
pub(crate) fn is_open_elsewhere(database: &Path) -> Result<bool> {
    let not_read = |e| open_error(e, database);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let sql = Connection::open_with_flags(database, flags).map_err(not_read)?;
    sql.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(not_read)?;
    sql.busy_timeout(Duration::ZERO).map_err(not_read)?;
    match statements::read_exclusively(&sql) {
        Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => Ok(true),
        read => read.map(|()| false).map_err(not_read),
    }
}

/// Removes a log that belongs to another database, and creates the database if there is none. The caller has the exclusive
/// lock.
pub(crate) fn prepare(database: &Path, floor: &FenceFloor, boot: &str) -> Result<()> {
    let found = file_pair(database);
    let replaced = floor.pair().is_some_and(|known| known[..2] != found[..2] && known[2..] == found[2..]);
    let empty = fs::metadata(database).map_or(true, |meta| meta.len() == 0);
    if empty || replaced {
        for suffix in ["-wal", "-shm", "-journal"] {
            remove(&beside(database, suffix))?;
        }
    }
    if found[0] == 0 { create_database(database, boot) } else { Ok(()) }
}

/// Gives the log and its index the owner and mode of the database. The caller has the exclusive lock, so no other user has
/// been refused yet.
pub(crate) fn share_files(database: &Path, floor: &FenceFloor, pair: FilePair) {
    for suffix in ["-wal", "-shm"] {
        share_like(database, &beside(database, suffix));
    }
    floor.set_pair(pair);
}

/// Creates the database under another name and renames it, so that no process finds half of it. No other user may read the
/// file, because it holds attempts, which are secrets. A user who wants to share it creates an empty file, or changes its
/// mode.
fn create_database(database: &Path, boot: &str) -> Result<()> {
    let number = u64::from_ne_bytes(random_128()[..8].try_into().expect("8 of 16"));
    let new = beside(database, &format!(".new-{number:016x}"));
    let not_made = |e: &io::Error| io_error("cannot create", database, e);
    let made = (|| {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).map_err(|e| not_made(&e))?;
        statements::create_file(&new, boot).map_err(|e| open_error(e, database))?;
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
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error("cannot remove", path, &e)),
        _ => Ok(()),
    }
}
