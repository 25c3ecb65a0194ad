//! The session of the worker with the database file: begins and commits transactions, and opens the file again if it was
//! deleted or replaced.

use std::path::Path;
use std::sync::atomic::Ordering;

use lockkeeper_core::table::Now;
use lockkeeper_core::{BootInstant, Error, Finding, Promise, Result};
use lockkeeper_host::random_128;
use rusqlite::Connection;
use rusqlite::ffi::SQLITE_IOERR_FSYNC;

use crate::config::Options;
use crate::connection::{self, LockDatabase};
use crate::db_path::FileId;
use crate::error::{commit_error, sql_error};
use crate::identity::StoreIdentity;
use crate::profile::StorageInfo;
use crate::state_row::StateRow;
use crate::statements;
use crate::transaction::{PostCommit, Tx};
use crate::waiters::Waiters;

/// How many transactions a short-lived command makes at most. Other processes let the log grow longer between checkpoints.
const SHORT_LIVED: u32 = 256;
/// How many pages of log a short-lived command leaves: the next one reads a short log faster.
const SHORT_LOG: u32 = 64;
/// How many pages of log other processes leave: SQLite's own default.
const LONG_LOG: u32 = 1000;
/// How many requests of a short-lived command are pending together at most.
const FEW_REQUESTS: usize = 8;
/// A session sweeps in one of so many transactions.
const SWEEP_INTERVAL: u32 = 16;

#[derive(Debug)]
pub(crate) struct FileSession {
    options: Options,
    /// `None` while the session waits for other processes to close a database whose log or index was deleted.
    db: Option<LockDatabase>,
    /// The database that the session opened last.
    id: FileId,
    /// The inode and the creation time of that database: between two connections the file system may reuse the inode.
    file: [u64; 2],
    storage: StorageInfo,
    identity: StoreIdentity,
    /// The number of writing transactions so far.
    commits: u32,
    /// Whether this session has seen that the file has no locks of another boot.
    this_boot: bool,
    /// Whether a commit on this connection syncs the log inside its transaction.
    syncs_in_commit: bool,
}

/// The result of [`FileSession::begin`].
pub(crate) enum Begin {
    /// A transaction has begun.
    Begun,
    /// The log or its index was deleted. The session has opened the same database again.
    Reopened,
    /// The database was deleted or replaced. The session has opened the other one, and has a new identity.
    Replaced,
}

impl FileSession {
    pub fn open(mut options: Options) -> Result<Self> {
        let boot = lockkeeper_host::boot_id().map_err(|e| {
            let why = format!("cannot read the boot id of this machine: {e}");
            // Other errors pass, for instance that no file descriptor is left.
            let lasting = e.kind() == std::io::ErrorKind::NotFound;
            if lasting { Error::Unsupported(why) } else { Error::Unavailable(why) }
        })?;
        // A relative path leads to another file after the program has changed its directory.
        options.path = std::path::absolute(&options.path)
            .map_err(|e| Error::invalid(format!("{}: {e}", options.path.display())))?;
        let db = LockDatabase::open(&options, boot.as_deref().unwrap_or_default())?;
        let random = random_128();
        let identity = StoreIdentity::new(&db.path, random, boot)?;
        // Short-lived processes sweep too: each begins its count at a random number.
        let commits = u32::from(random[0]) % SWEEP_INTERVAL;
        let (id, file, storage) = (db.id, db.file(), db.storage.clone());
        Ok(FileSession {
            options,
            db: Some(db),
            id,
            file,
            storage,
            identity,
            commits,
            this_boot: false,
            syncs_in_commit: true,
        })
    }

    pub fn path(&self) -> &Path {
        &self.options.path
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    pub fn identity(&self) -> &StoreIdentity {
        &self.identity
    }

    pub fn now(&self) -> BootInstant {
        self.options.clock.now()
    }

    /// The file system that the file is stored on, and warnings about it.
    pub fn storage(&self) -> StorageInfo {
        let mut storage = self.storage.clone();
        if self.identity.boot.is_none() {
            storage.findings.push(Finding::hint(
                Promise::Waiting,
                "this container masks the identity of the boot: after a reboot of the machine, locks that were held \
                 before end with their ttl",
            ));
        }
        storage
    }

    /// The connection, if a transaction has begun on it.
    fn sql(&self) -> Result<&Connection> {
        let closed = || Error::Unavailable(format!("{} is not open", self.options.path.display()));
        self.db.as_ref().map(|db| &db.sql).ok_or_else(closed)
    }

    /// Begins a transaction if the path still leads to the open file. A session that went on with a deleted or replaced
    /// file would keep a second set of the same locks.
    pub fn begin(&mut self, writes: bool) -> Result<Begin> {
        self.rollback();
        if let Some(db) = &self.db {
            // It may fail because of a deleted log, so an error says nothing about the files that are there now.
            let begun = connection::begin(&db.sql, writes);
            if db.is_in_place(&self.options.path) {
                return begun.map(|()| Begin::Begun);
            }
        }
        self.rollback();
        self.reopen()
    }

    /// Begins a writing transaction on the open file, unless that would have to wait for another process.
    pub fn begin_at_once(&mut self) -> bool {
        self.rollback();
        let Some(db) = &self.db else { return false };
        db.impatient.store(true, Ordering::Relaxed);
        let begun = connection::begin(&db.sql, true).is_ok();
        db.impatient.store(false, Ordering::Relaxed);
        let begun = begun && db.is_in_place(&self.options.path);
        if !begun {
            self.rollback();
        }
        begun
    }

    /// Ends a transaction without a commit, if one has begun.
    pub fn rollback(&self) {
        if let Some(db) = &self.db
            && !db.sql.is_autocommit()
        {
            let _ = statements::run(&db.sql, "ROLLBACK");
        }
    }

    fn reopen(&mut self) -> Result<Begin> {
        {
            // A process that Ctrl-Z stops between the two would keep all others from the file.
            let _busy = lockkeeper_host::while_busy();
            self.save_lost_log()?;
            // Before the open: as long as a process has a connection to the database, SQLite gives it the deleted index again.
            self.db = None;
        }
        let boot = self.identity.boot.clone();
        let db = LockDatabase::open(&self.options, boot.as_deref().unwrap_or_default())?;
        let same = db.file() == self.file;
        if !same {
            self.identity = StoreIdentity::new(&db.path, random_128(), boot)?;
        }
        (self.id, self.file, self.storage) = (db.id, db.file(), db.storage.clone());
        self.db = Some(db);
        (self.this_boot, self.syncs_in_commit) = (false, true);
        self.commits %= SWEEP_INTERVAL;
        let path = self.options.path.display();
        if same {
            tracing::warn!(%path, "the log of the file or its index was deleted: opened the file again");
            return Ok(Begin::Reopened);
        }
        tracing::warn!(%path, "the file was deleted or replaced: its locks are lost");
        Ok(Begin::Replaced)
    }

    /// Copies the log into the database if it was deleted.
    pub fn save_lost_log(&self) -> Result<()> {
        self.db.as_ref().map_or(Ok(()), |db| db.save_lost_log(&self.identity.floor))
    }

    /// Whether the log or its index was deleted while this process has the database open: no other process can open it
    /// until this one has closed it.
    pub fn has_lost_files(&self) -> bool {
        !self.is_in_place() && FileId::of(&self.options.path) == Some(self.id)
    }

    /// Whether the path still leads to the open files.
    pub fn is_in_place(&self) -> bool {
        self.db.as_ref().is_some_and(|db| db.is_in_place(&self.options.path))
    }

    /// Takes a new identity in the same file, because the pipe of the old one was deleted.
    pub fn renew_identity(&mut self) {
        self.identity.peer = random_128();
        self.identity.wake_pipe = std::cell::OnceCell::new();
    }

    pub fn knows_this_boot(&self) -> bool {
        self.this_boot
    }

    /// In a reading transaction: whether the file has no locks of another boot. A reader checks this without the write
    /// lock, so that it does not wait for a writer.
    pub fn check_boot(&mut self) -> Result<bool> {
        let (now, state) = (self.now(), self.sql().and_then(StateRow::read));
        self.rollback();
        self.this_boot = !state?.0.is_of_another_boot(self.identity.boot.as_deref(), now);
        Ok(self.this_boot)
    }

    /// Runs `work` in the reading transaction that has begun. The second value says whether `work` found something that
    /// only a writing transaction can do.
    pub fn run_read<T>(
        &self,
        waiters: &Waiters,
        sent: BootInstant,
        work: impl FnOnce(&mut Tx<'_>) -> Result<T>,
    ) -> Result<(T, bool)> {
        let mut tx = Tx::new(self.sql()?, &self.identity, waiters, false, sent, self.time());
        let done = work(&mut tx);
        let needs_write = tx.needs_write;
        self.rollback();
        Ok((done?, needs_write))
    }

    /// Runs `work` in the writing transaction that has begun, grants locks to waiters of this process, and commits.
    pub fn run_write<T>(
        &mut self,
        waiters: &Waiters,
        sent: BootInstant,
        work: impl FnOnce(&mut Tx<'_>) -> Result<T>,
    ) -> Result<(T, PostCommit)> {
        self.commits = self.commits.wrapping_add(1);
        let mut tx = Tx::new(self.sql()?, &self.identity, waiters, true, sent, self.time());
        let sweeps = self.commits.is_multiple_of(SWEEP_INTERVAL);
        let done = (|| {
            tx.load()?;
            let done = work(&mut tx)?;
            if sweeps {
                tx.sweep()?;
            }
            tx.grant_waiters()?;
            tx.wake_watchers()?;
            tx.save()?;
            Ok(done)
        })();
        let after = tx.after;
        let end = match done {
            Ok(_) => statements::run(self.sql()?, "COMMIT").map_err(|e| {
                self.note_commit_error(&e);
                commit_error(e)
            }),
            Err(_) => Ok(()),
        };
        self.rollback();
        let done = done?;
        end?;
        self.this_boot = true;
        Ok((done, after))
    }

    /// Takes this process for a long-lived one if many of its requests are pending together. Each batch of a crowd writes more
    /// pages than the short log has, so each would end with a checkpoint and two more syncs.
    pub fn note_batch(&mut self, requests: usize) {
        if requests > FEW_REQUESTS {
            self.commits = self.commits.max(SHORT_LIVED);
        }
    }

    /// Whether the log is so long that it should be copied into the database.
    pub fn has_long_log(&self) -> bool {
        let long = if self.commits >= SHORT_LIVED { LONG_LOG } else { SHORT_LOG };
        self.db.as_ref().is_some_and(|db| db.log.pages() >= long)
    }

    /// Copies the log into the database, as far as other processes allow.
    pub fn checkpoint(&self) {
        if let Some(db) = &self.db {
            let _ = statements::checkpoint(&db.sql, "PASSIVE");
            db.log.start_counting();
        }
    }

    /// Copies the log into the database if this process has written much.
    pub fn checkpoint_at_end(&self) {
        self.repair_log();
        if self.commits > SHORT_LIVED {
            self.checkpoint();
        }
    }

    fn time(&self) -> Now {
        Now { moment: self.options.clock.now(), wall: self.options.clock.wall() }
    }

    /// Sets whether the next commit syncs the log inside its transaction, so that no other process sees the change before it is on
    /// the disk.
    pub fn set_sync_in_commit(&mut self, sync: bool) -> Result<()> {
        if let Some(db) = &self.db
            && self.syncs_in_commit != sync
        {
            let level = if sync { connection::FULL } else { connection::NORMAL };
            statements::set_pragma(&db.sql, "synchronous", level).map_err(sql_error)?;
            self.syncs_in_commit = sync;
        }
        Ok(())
    }

    /// Brings all commits so far to the disk, unless the last one has done so itself.
    pub fn sync(&self) -> Result<()> {
        match &self.db {
            Some(db) if !self.syncs_in_commit || db.log.is_damaged() => db.log.sync(&db.sql),
            _ => Ok(()),
        }
    }

    /// After a sync that failed: tries to begin the log anew. Another process that opens the log from now on does not learn of the failure.
    pub fn repair_log(&self) {
        if let Some(db) = &self.db
            && db.log.is_damaged()
        {
            let _ = db.log.sync(&db.sql);
        }
    }

    /// After a commit that could not sync the log, earlier commits that did not sync it themselves may be missing on the disk too.
    fn note_commit_error(&self, error: &rusqlite::Error) {
        let code = error.sqlite_error().map(|error| error.extended_code);
        if let (Some(db), Some(SQLITE_IOERR_FSYNC)) = (&self.db, code) {
            db.log.note_failed_sync();
        }
    }

    #[cfg(test)]
    pub fn assume_disk(&self, quick: bool) {
        self.db.as_ref().expect("it is open").log.assume(quick);
    }

    /// Whether the disk is so quick that a caller may wait for it on its own thread.
    pub fn has_quick_disk(&self) -> bool {
        self.db.as_ref().is_some_and(|db| db.log.is_quick())
    }
}
