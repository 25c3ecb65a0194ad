//! The log of the database on the disk: brings commits to the disk after their transaction, and says when the log is long.
//!
//! SQLite itself would sync inside the transaction, and every other process would wait for the disk together with this one.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::{Error, Result};
use rusqlite::Connection;

use crate::db_path::{FileId, beside};
use crate::error::sql_error;
use crate::statements;

/// A sync that takes no longer than this may be done on the thread of a caller.
const QUICK_SYNC: Duration = Duration::from_micros(250);
/// How many syncs in a row must be quick.
const QUICK_SYNCS: u32 = 4;

/// The log that a connection has open.
#[derive(Debug)]
pub(crate) struct LogFile {
    file: File,
    /// How many pages the log has after the last commit of this connection.
    pages: Arc<AtomicU32>,
    /// A sync has failed. The kernel reports that once, and what it could not write may be missing on the disk for good.
    damaged: Cell<bool>,
    /// How many of the last syncs were quick.
    quick: Cell<u32>,
}

impl LogFile {
    /// Opens the log beside the database, if it is the one that `log` identifies.
    pub fn open(database: &Path, log: Option<FileId>, pages: Arc<AtomicU32>) -> Option<Self> {
        let file = File::open(beside(database, "-wal")).ok()?;
        let meta = file.metadata().ok()?;
        (log == Some(FileId::new(meta.dev(), meta.ino()))).then(|| LogFile {
            file,
            pages,
            damaged: Cell::new(false),
            quick: Cell::new(0),
        })
    }

    /// Counts the pages of the log at each commit, in place of SQLite's own checkpoints, for which the caller of a commit would wait.
    pub fn count_pages(sql: &mut Connection) -> rusqlite::Result<Arc<AtomicU32>> {
        let pages = Arc::new(AtomicU32::new(0));
        let counter = pages.clone();
        sql.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, pages: std::ffi::c_int| {
            counter.store(pages.unsigned_abs(), Ordering::Relaxed);
            Ok(())
        }))?;
        Ok(pages)
    }

    pub fn pages(&self) -> u32 {
        self.pages.load(Ordering::Relaxed)
    }

    /// After a checkpoint: the next commit says how long the log is now.
    pub fn start_counting(&self) {
        self.pages.store(0, Ordering::Relaxed);
    }

    /// Brings all commits so far to the disk.
    ///
    /// After a sync that failed, a later one says nothing about the pages of the earlier one, and SQLite reads the log only up to the
    /// first page that is missing. So the whole log is copied into the database then, from memory, and begins anew.
    pub fn sync(&self, sql: &Connection) -> Result<()> {
        let unknown = |why: &dyn std::fmt::Display| {
            Error::Unknown(format!(
                "the commit may not be on the disk, and a power cut could take it back: {why}"
            ))
        };
        let began = Instant::now();
        if self.damaged.get() {
            if !statements::checkpoint(sql, "RESTART").map_err(|e| unknown(&sql_error(e)))? {
                return Err(unknown(&"the log cannot begin anew while another process reads it"));
            }
            self.damaged.set(false);
        } else if let Err(error) = self.file.sync_data() {
            self.note_failed_sync();
            return Err(unknown(&error));
        }
        let quick = began.elapsed() <= QUICK_SYNC;
        self.quick.set(if quick { (self.quick.get() + 1).min(QUICK_SYNCS) } else { 0 });
        Ok(())
    }

    pub fn note_failed_sync(&self) {
        self.damaged.set(true);
        self.quick.set(0);
    }

    pub fn is_damaged(&self) -> bool {
        self.damaged.get()
    }

    #[cfg(test)]
    pub fn assume(&self, quick: bool) {
        self.quick.set(if quick { QUICK_SYNCS } else { 0 });
    }

    /// Whether the disk has been so quick of late that a caller may wait for it on its own thread.
    pub fn is_quick(&self) -> bool {
        self.quick.get() == QUICK_SYNCS
    }
}
