//! The connection to the database: opens the file, and refuses a file that does not meet the preconditions.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Result};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::busy_handler::busy_handler;
use crate::config::Options;
use crate::db_files::{self, WalFiles};
use crate::db_path::{self, FileId};
use crate::error::{open_error, sql_error};
use crate::fence_floor::FenceFloor;
use crate::profile::{StorageInfo, check_file_system};
use crate::statements;

/// An open database that meets the preconditions.
pub(crate) struct LockDatabase {
    pub sql: Connection,
    pub path: PathBuf,
    pub id: FileId,
    wal_files: WalFiles,
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
        loop {
            let complete = db_files::are_complete(&path, &floor);
            let lock = db_files::lock_directory(&path, !complete)?;
            if !complete {
                db_files::prepare(&path, &floor, boot)?;
            }
            let before = FileId::of(&path);
            db_path::check_shared_with_directory(&path)?;
            if before.is_some()
                && !floor.exists()
                && let Err(error) = check_foreign_file(&path)
            {
                // The file was deleted or replaced meanwhile: look at the new one.
                if FileId::of(&path) != before {
                    continue;
                }
                return Err(error);
            }
            let sql = connect(&path, boot);
            let (after, wal_files) = (FileId::of(&options.path), WalFiles::of(&path));
            // The file was replaced during the open: the connection may have either of the two.
            let Some(id) = after.filter(|after| before == Some(*after)) else { continue };
            if !complete && db_files::has_another_log(&path, &floor) && log_is_missing(&path) {
                // The process that has the deleted log open saves it, and needs the lock on the directory for that.
                drop((sql, lock));
                if !wait(round) {
                    return Err(log_deleted_error(&path));
                }
                round += 1;
                continue;
            }
            let sql = sql?;
            if !complete {
                db_files::share_files(&path, &floor);
            }
            return Ok(LockDatabase { sql, path, id, wal_files, unchanged: Cell::new(None), storage });
        }
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

    /// Whether the log, and only the log, was deleted while this process has it open.
    pub fn has_lost_log(&self) -> bool {
        FileId::of(&self.path) == Some(self.id) && self.wal_files.lost_log_only(&WalFiles::of(&self.path))
    }

    /// Copies a deleted log into the database: the descriptor of this process is the last access to it.
    pub fn save_lost_log(&self) {
        if !self.wal_files.lost_log_only(&WalFiles::of(&self.path)) {
            return;
        }
        // A process that Ctrl-Z stops inside a checkpoint would keep the write lock.
        let _busy = lockkeeper_host::while_busy();
        // A process that opens the file has the checkpoint lock for a moment, and SQLite calls no busy handler for that lock.
        let (mut wait, mut round) = (busy_handler(&self.path), 0);
        while statements::checkpoint(&self.sql, "FULL").is_ok_and(|complete| !complete) && wait(round) {
            round += 1;
        }
    }
}

/// Whether the shared index has commits that are not in the log of this path. This uses a connection of its own, so that
/// the usual connection reports any other problem.
fn log_is_missing(path: &Path) -> bool {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let Ok(sql) = Connection::open_with_flags(path, flags) else { return false };
    let _ = sql.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    let read = statements::checkpoint(&sql, "PASSIVE");
    read.is_err_and(|e| e.sqlite_error_code() == Some(ErrorCode::SystemIoFailure))
}

fn log_deleted_error(path: &Path) -> Error {
    Error::Unavailable(format!(
        "{}-wal was deleted while another process has it open. That process saves it within seconds, unless it is \
         stopped: continue it, or end it, and try again",
        path.display()
    ))
}

/// `synchronous`: every commit waits for the disk.
pub(crate) const FULL: i64 = 2;
/// `synchronous`: only a checkpoint waits for the disk.
pub(crate) const NORMAL: i64 = 1;
/// After how many pages of log SQLite makes a checkpoint.
const SHORT_LOG: i64 = 64;
/// The same for a process that writes much: SQLite's own default.
pub(crate) const LONG_LOG: i64 = 1000;

fn connect(path: &Path, boot: &str) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let not_open = |e| open_error(e, path);
    let mut sql = Connection::open_with_flags(path, flags).map_err(not_open)?;
    // A short command must not pay for a checkpoint at its end. And closing must not copy the log of another database, which
    // shows only when it is read, into this one.
    sql.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(not_open)?;
    sql.busy_handler(Some(busy_handler(path))).map_err(not_open)?;
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
    // The next open reads a short log faster.
    statements::set_pragma(&sql, "wal_autocheckpoint", SHORT_LOG).map_err(not_open)?;
    sql.set_prepared_statement_cache_capacity(64);
    Ok(sql)
}

/// The application id and the format version in the file header.
fn file_version(sql: &Connection) -> rusqlite::Result<(i64, i64)> {
    Ok((statements::pragma(sql, "application_id")?, statements::pragma(sql, "user_version")?))
}

fn check_version((application, version): (i64, i64), path: &Path) -> Result<()> {
    if application != statements::APPLICATION {
        return Err(Error::invalid(format!(
            "{} is a database of another application: it was left as it is",
            path.display()
        )));
    }
    if version > statements::VERSION {
        return Err(Error::Unsupported(format!(
            "{} was written by a newer Lockkeeper (format {version}, this one knows {}): upgrade this one",
            path.display(),
            statements::VERSION
        )));
    }
    Ok(())
}

/// Checks a file without a fence floor beside it, which may belong to another application. A normal connection would create
/// or checkpoint its log even to read one number; an immutable one only reads. It takes no file lock, so a process that is
/// creating the file may disturb the first check, but not the last.
fn check_foreign_file(path: &Path) -> Result<()> {
    let mut wait = busy_handler(path);
    for round in 0..4 {
        if check_foreign_once(path).is_ok() {
            return Ok(());
        }
        wait(round);
    }
    check_foreign_once(path)
}

fn check_foreign_once(path: &Path) -> Result<()> {
    if fs::metadata(path).is_ok_and(|meta| meta.len() == 0) {
        return Ok(());
    }
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'/' | b'.' | b'-' | b'_' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => {
                uri.push(char::from(*byte))
            }
            _ => uri.push_str(&format!("%{byte:02x}")),
        }
    }
    uri.push_str("?immutable=1");
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    let not_open = |e| open_error(e, path);
    let sql = Connection::open_with_flags(uri, flags).map_err(not_open)?;
    match file_version(&sql).map_err(not_open)? {
        (0, 0) if statements::is_blank(&sql).map_err(not_open)? => Ok(()),
        found => check_version(found, path),
    }
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
