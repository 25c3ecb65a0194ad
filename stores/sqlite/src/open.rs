//! Opening the file, and the guard of its preconditions: what is not as it must be is refused, never mended silently.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Result};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::busy::patience;
use crate::fault::{fault, open_fault};
use crate::files::{self, Helpers};
use crate::floor::Floor;
use crate::place::{self, Identity};
use crate::{Options, script};

/// An open file that was found in order.
pub(crate) struct Database {
    pub sql: Connection,
    pub path: PathBuf,
    pub identity: Identity,
    helpers: Helpers,
    /// The directory when all was last found in place.
    unchanged: Cell<Option<files::Stamp>>,
    /// Whether it keeps what was synced, and what a user should know about it otherwise.
    pub medium: place::Medium,
}

impl Database {
    pub fn open(options: &Options, boot: &str) -> Result<Database> {
        let path = place::find(options)?;
        let medium = place::check_file_system(&path, options)?;
        let floor = Floor::beside(&path);
        loop {
            let whole = files::are_whole(&path, &floor);
            let _turn = files::turn(&path, !whole)?;
            if !whole {
                files::prepare(&path, &floor, boot)?;
            }
            let before = Identity::of(&path);
            place::check_not_alone(&path)?;
            if before.is_some() && !floor.exists() {
                look_first(&path)?;
            }
            let sql = connect(&path, boot);
            let (after, helpers) = (Identity::of(&options.path), Helpers::of(&path));
            // Replaced while it was being opened: which of the two we have is not known.
            let Some(identity) = after.filter(|after| before == Some(*after)) else { continue };
            let sql = sql?;
            if !whole {
                files::share(&path, &floor);
            }
            return Ok(Database { sql, path, identity, helpers, unchanged: Cell::new(None), medium });
        }
    }

    /// Whether the files are still those that were opened. As long as nothing was made, removed or renamed in their
    /// directory, they are: one look instead of three.
    pub fn is_in_place(&self, path: &Path) -> bool {
        let dir = files::Stamp::of(self.path.parent().unwrap_or(Path::new("/")));
        if path == self.path && dir.is_some() && dir == self.unchanged.get() {
            return true;
        }
        let in_place = Identity::of(path) == Some(self.identity) && Helpers::of(&self.path) == self.helpers;
        self.unchanged.set(dir.filter(|dir| in_place && dir.is_old()));
        in_place
    }

    /// Saves what only this process has, when somebody deleted the log under it: its descriptor is the last way to it.
    pub fn save_lost_log(&self) {
        if self.helpers.lost_the_log(&Helpers::of(&self.path)) {
            let _ = script::checkpoint(&self.sql, "FULL");
        }
    }
}

/// `synchronous`: a commit waits for the disk.
pub(crate) const FULL: i64 = 2;
/// `synchronous`: only copying the log into the database does.
pub(crate) const NORMAL: i64 = 1;
/// How many pages the log has before it is copied into the database.
const SHORT_LOG: i64 = 64;
/// The same, for a process that writes much: it is SQLite's own default.
pub(crate) const LONG_LOG: i64 = 1000;

fn connect(path: &Path, boot: &str) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let not_open = |e| open_fault(e, path);
    let mut sql = Connection::open_with_flags(path, flags).map_err(not_open)?;
    sql.busy_handler(Some(patience(path))).map_err(not_open)?;
    if sql.is_readonly("main").map_err(not_open)? {
        return Err(Error::Denied(format!("the file {} cannot be written", path.display())));
    }
    let mut found = stamp(&sql).map_err(not_open)?;
    if found.0 == 0 {
        script::create(&sql, boot).map_err(not_open)?;
        found = stamp(&sql).map_err(not_open)?;
    }
    if found == (script::APPLICATION, 1) {
        script::upgrade(&sql).map_err(not_open)?;
        found = stamp(&sql).map_err(not_open)?;
    }
    check_stamp(found, path)?;
    write_ahead(&sql, path)?;
    // Durable when the commit returns: with less, a power cut takes back a grant that was told.
    script::set_pragma(&sql, "synchronous", FULL).map_err(not_open)?;
    if script::pragma(&sql, "synchronous").map_err(not_open)? != FULL {
        return Err(Error::Unsupported("SQLite does not take synchronous=FULL".into()));
    }
    // A short command must not pay for tidying up at its end; and a short log is quickly read at the next open.
    sql.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(not_open)?;
    script::set_pragma(&sql, "wal_autocheckpoint", SHORT_LOG).map_err(not_open)?;
    sql.set_prepared_statement_cache_capacity(64);
    Ok(sql)
}

/// The application's number and the version of the schema.
fn stamp(sql: &Connection) -> rusqlite::Result<(i64, i64)> {
    Ok((script::pragma(sql, "application_id")?, script::pragma(sql, "user_version")?))
}

fn check_stamp((application, version): (i64, i64), path: &Path) -> Result<()> {
    if application != script::APPLICATION {
        return Err(Error::invalid(format!(
            "{} is a database of another application: it was left as it is",
            path.display()
        )));
    }
    if version > script::VERSION {
        return Err(Error::Unsupported(format!(
            "{} was written by a newer Lockkeeper (format {version}, this one knows {}): upgrade this one",
            path.display(),
            script::VERSION
        )));
    }
    Ok(())
}

/// A file without our floor beside it may be anybody's. To read even one number SQLite would make a log for it, or
/// bring its log to an end; as an immutable file it is only read. That takes no lock: somebody who is just making our
/// file may spoil the first look, but not the last.
fn look_first(path: &Path) -> Result<()> {
    let mut wait = patience(path);
    for round in 0..4 {
        if look(path).is_ok() {
            return Ok(());
        }
        wait(round);
    }
    look(path)
}

fn look(path: &Path) -> Result<()> {
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
    let not_open = |e| open_fault(e, path);
    let sql = Connection::open_with_flags(uri, flags).map_err(not_open)?;
    match stamp(&sql).map_err(not_open)? {
        (0, 0) if script::is_blank(&sql).map_err(not_open)? => Ok(()),
        found => check_stamp(found, path),
    }
}

/// Turns write-ahead logging on. The switch needs the file for itself for a moment, and SQLite does not wait for that.
fn write_ahead(sql: &Connection, path: &Path) -> Result<()> {
    if script::journal_mode(sql, false).is_ok_and(|mode| mode == "wal") {
        return Ok(());
    }
    let mut wait = patience(path);
    for round in 0.. {
        match script::journal_mode(sql, true) {
            Ok(mode) if mode == "wal" => break,
            Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && wait(round) => {}
            Ok(mode) => {
                return Err(Error::Unsupported(format!(
                    "{} stays in journal mode {mode:?}: write-ahead logging is needed, and its file system may not \
                     allow the shared memory for it",
                    path.display()
                )));
            }
            Err(e) => return Err(open_fault(e, path)),
        }
    }
    Ok(())
}

impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Database({})", self.path.display())
    }
}

pub(crate) fn begin(sql: &Connection, write: bool) -> Result<()> {
    script::run(sql, if write { "BEGIN IMMEDIATE" } else { "BEGIN" }).map_err(fault)
}
