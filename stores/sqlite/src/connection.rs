//! The connection to the database: opens the file, and refuses a file that does not meet the preconditions.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use lockkeeper_core::{Error, Result};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::busy_handler::{busy_handler, busy_handler_unless};
use crate::config::Options;
use crate::db_files::{self, WalFiles};
use crate::db_path::{self, FileId, FilePair, beside, file_pair};
use crate::error::{open_error, sql_error};
use crate::fence_floor::FenceFloor;
use crate::file_version::{check_foreign_file, check_version, file_version};
use crate::log_file::LogFile;
use crate::profile::{StorageInfo, check_file_system};
use crate::statements;

/// An open database that meets the preconditions.
pub(crate) struct LockDatabase {
    pub sql: Connection,
    pub log: LogFile,
    /// While it is set, a transaction does not begin if it had to wait for another process.
    pub impatient: Arc<AtomicBool>,
    pub path: PathBuf,
    pub id: FileId,
    wal_files: WalFiles,
    /// The database and the log that the connection has open.
    pair: FilePair,
    /// The directory at the last successful check of the files.
    unchanged: Cell<Option<db_files::DirStamp>>,
    /// The file system that the file is stored on.
    pub storage: StorageInfo,
}

impl LockDatabase {
    pub fn open(options: &Options, boot: &str) -> Result<LockDatabase> {
        // A process that Ctrl-Z stops here would keep the lock on the directory, or the write lock.
        let _busy = lockkeeper_host::while_busy();
        let path = db_path::resolve(options)?;
        let storage = check_file_system(&path, options)?;
        let floor = FenceFloor::beside(&path);
        let (mut wait, mut round) = (busy_handler(&path), 0);
        // Whether a user deleted or replaced a file during the last try.
        let mut changed = false;
        loop {
            let known = WalFiles::of(&path);
            let complete = !changed && db_files::are_complete(&path, &floor);
            let lock = db_files::lock_directory(&path, !complete)?;
            if !complete {
                db_files::prepare(&path, &floor, boot)?;
            }
            let before = FileId::of(&path);
            // A user deleted the file after it was created, or after it was found complete.
            if before.is_none() {
                continue;
            }
            db_path::check_shared_with_directory(&path)?;
            if !floor.exists()
                && let Err(error) = check_foreign_file(&path)
            {
                // The file was deleted or replaced meanwhile: look at the new one.
                if FileId::of(&path) != before {
                    continue;
                }
                return Err(error);
            }
            // A process with the deleted file open would go on with that one, and this process with a new one.
            let may_be_open = !complete && (changed || db_files::has_lost_files(&path, &floor));
            let is_open = if may_be_open { db_files::is_open_elsewhere(&path) } else { Ok(false) };
            if FileId::of(&path) != before {
                continue;
            }
            if is_open? {
                drop(lock);
                if !wait(round) {
                    return Err(files_deleted_error(&path));
                }
                round += 1;
                continue;
            }
            let impatient = Arc::new(AtomicBool::new(false));
            let opened = connect(&path, boot, &impatient);
            let (after, wal_files) = (FileId::of(&options.path), WalFiles::of(&path));
            let pair = file_pair(&path);
            // The file was replaced during the open: the connection may have either of the two.
            let Some(id) = after.filter(|after| before == Some(*after)) else { continue };
            changed = complete && wal_files != known;
            if changed {
                continue;
            }
            let (sql, pages) = opened?;
            let log = LogFile::open(&path, wal_files.log, pages).filter(|_| wal_files.exist());
            changed = log.is_none();
            let Some(log) = log else {
                drop((sql, lock));
                if !wait(round) {
                    return Err(files_deleted_error(&path));
                }
                round += 1;
                continue;
            };
            if !complete {
                db_files::share_files(&path, &floor, pair);
            }
            let unchanged = Cell::new(None);
            return Ok(LockDatabase { sql, log, impatient, path, id, wal_files, pair, unchanged, storage });
        }
    }

    /// The inode and the creation time of the database.
    pub fn file(&self) -> [u64; 2] {
        let [inode, created, ..] = self.pair;
        [inode, created]
    }

    /// Whether the path still leads to the open files. If no entry of the directory has changed since the last check, one
    /// `stat` answers that instead of three.
    pub fn is_in_place(&self, path: &Path) -> bool {
        let dir = db_files::DirStamp::of(self.path.parent().unwrap_or(Path::new("/")));
        if path == self.path && dir.is_some() && dir == self.unchanged.get() {
            return true;
        }
        let in_place = FileId::of(path) == Some(self.id) && WalFiles::of(&self.path) == self.wal_files;
        self.unchanged.set(dir.filter(|dir| in_place && dir.is_old()));
        in_place
    }

    /// Copies a deleted log into the database: the descriptors of the processes that have it open are the last access to
    /// it. No process opens the database meanwhile, so all that have it open have the same log. An error keeps the
    /// connection: without it the log is lost.
    pub fn save_lost_log(&self, floor: &FenceFloor) -> Result<()> {
        if !self.has_lost_log(floor) {
            return Ok(());
        }
        // A process that Ctrl-Z stops inside a checkpoint would keep the write lock.
        let _busy = lockkeeper_host::while_busy();
        let _lock = db_files::lock_directory(&self.path, true)?;
        let (mut wait, mut round) = (busy_handler(&self.path), 0);
        while self.has_lost_log(floor) && !statements::checkpoint(&self.sql, "FULL").map_err(sql_error)? {
            // The checkpoint waits for readers and for other checkpoints, for which SQLite calls no busy handler.
            if !wait(round) {
                return Err(Error::Unavailable(format!(
                    "{}-wal was deleted, and cannot be saved while another process reads the database",
                    self.path.display()
                )));
            }
            round += 1;
        }
        Ok(())
    }

    /// Whether the log was deleted, and no process has begun another one, as older versions and other programs do. The
    /// frames of another log are not in the file that this connection has open, but the shared index lists them.
    fn has_lost_log(&self, floor: &FenceFloor) -> bool {
        let begun = floor.pair().is_some_and(|pair| pair[2] != 0 && pair != self.pair)
            || fs::metadata(beside(&self.path, "-wal")).is_ok_and(|meta| meta.len() > 0);
        let lost = self.wal_files.has_lost_log(&WalFiles::of(&self.path));
        lost && !begun && FileId::of(&self.path) == Some(self.id)
    }
}

fn files_deleted_error(path: &Path) -> Error {
    Error::Unavailable(format!(
        "{0}-wal or {0}-shm was deleted while another process has the database open. That process closes it within seconds, \
         unless it is stopped: continue it, or end it, and try again",
        path.display()
    ))
}

/// `synchronous`: every commit waits for the disk, before any other process sees it.
pub(crate) const FULL: i64 = 2;
/// `synchronous`: only a checkpoint waits for the disk.
pub(crate) const NORMAL: i64 = 1;

fn connect(path: &Path, boot: &str, impatient: &Arc<AtomicBool>) -> Result<(Connection, Arc<AtomicU32>)> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let not_open = |e| open_error(e, path);
    let mut sql = Connection::open_with_flags(path, flags).map_err(not_open)?;
    // A short command must not pay for a checkpoint at its end. And closing must not copy the log of another database, which
    // shows only when it is read, into this one.
    sql.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(not_open)?;
    // Else SQLite compiles some statements anew for each new value, in case another plan is better. All plans are the same here.
    sql.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map_err(not_open)?;
    sql.busy_handler(Some(busy_handler_unless(path, impatient.clone()))).map_err(not_open)?;
    if sql.is_readonly("main").map_err(not_open)? {
        return Err(Error::Denied(format!("the file {} cannot be written", path.display())));
    }
    let mut found = file_version(&sql).map_err(not_open)?;
    if found.0 == 0 {
        statements::create_tables(&sql, boot).map_err(not_open)?;
        found = file_version(&sql).map_err(not_open)?;
    }
    if found.0 == statements::APPLICATION && found.1 < statements::VERSION {
        statements::upgrade(&sql).map_err(not_open)?;
        found = file_version(&sql).map_err(not_open)?;
    }
    check_version(found, path)?;
    enable_wal(&sql, path)?;
    // A commit is durable when it returns: with less, a power cut would undo a grant that a caller has seen.
    statements::set_pragma(&sql, "synchronous", FULL).map_err(not_open)?;
    if statements::pragma(&sql, "synchronous").map_err(not_open)? != FULL {
        return Err(Error::Unsupported("SQLite does not take synchronous=FULL".into()));
    }
    let pages = LogFile::count_pages(&mut sql).map_err(not_open)?;
    sql.set_prepared_statement_cache_capacity(64);
    Ok((sql, pages))
}

/// Switches to write-ahead logging. The switch needs an exclusive lock for a moment, for which SQLite does not wait.
fn enable_wal(sql: &Connection, path: &Path) -> Result<()> {
    if statements::journal_mode(sql, false).is_ok_and(|mode| mode == "wal") {
        return Ok(());
    }
    let mut wait = busy_handler(path);
    for round in 0.. {
        match statements::journal_mode(sql, true) {
            Ok(mode) if mode == "wal" => break,
            Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && wait(round) => {}
            Ok(mode) => {
                return Err(Error::Unsupported(format!(
                    "{} stays in journal mode {mode:?}: write-ahead logging is needed, and its file system may not \
                     allow the shared memory for it",
                    path.display()
                )));
            }
            Err(e) => return Err(open_error(e, path)),
        }
    }
    Ok(())
}

impl std::fmt::Debug for LockDatabase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LockDatabase({})", self.path.display())
    }
}

pub(crate) fn begin(sql: &Connection, write: bool) -> Result<()> {
    statements::run(sql, if write { "BEGIN IMMEDIATE" } else { "BEGIN" }).map_err(sql_error)
}
