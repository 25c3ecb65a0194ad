//! Errors: what SQLite and the file system report, as errors of `core`.

use std::io;
use std::path::Path;

use lockkeeper_core::Error;
use rusqlite::ErrorCode;
use rustix::fs::{Access, access};

/// An error before the commit: the request had no effect.
pub(crate) fn sql_error(e: rusqlite::Error) -> Error {
    let text = e.to_string();
    match e.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Error::Unavailable(format!(
            "the file is busy: no process released its write lock within {} s",
            crate::config::NO_PROGRESS_LIMIT.as_secs()
        )),
        Some(ErrorCode::DiskFull) => Error::Unavailable("the disk is full".into()),
        Some(
            ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied,
        ) => Error::Denied(format!("the file cannot be written ({text})")),
        Some(ErrorCode::NotADatabase) => {
            Error::Unavailable(format!("the file is not an SQLite database ({text}); it was left as it is"))
        }
        Some(ErrorCode::DatabaseCorrupt) => Error::Unavailable(format!(
            "the file is damaged ({text}): stop all programs that use it and restore it. If a copy was written over it, \
             remove its -wal and -shm; else remove all three to start with an empty file"
        )),
        _ => Error::Unavailable(format!("SQLite: {text}")),
    }
}

/// An error of the commit itself. If the write of the last page or its sync failed, the commit may or may not be on the
/// disk after a crash.
pub(crate) fn commit_error(e: rusqlite::Error) -> Error {
    match e.sqlite_error_code() {
        Some(ErrorCode::SystemIoFailure) => {
            Error::Unknown(format!("the commit failed half-way ({e}): retry with the same attempt"))
        }
        _ => sql_error(e),
    }
}

/// An error of the file system.
pub(crate) fn io_error(what: &str, path: &Path, e: &io::Error) -> Error {
    let text = format!("{what} {}: {e}", path.display());
    match e.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Error::Denied(text),
        _ => Error::Unavailable(text),
    }
}

/// SQLite reports "unable to open" for many reasons. This looks for the one that a user can fix: a missing permission.
pub(crate) fn open_error(e: rusqlite::Error, path: &Path) -> Error {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let may = Access::READ_OK | Access::WRITE_OK;
    match e.sqlite_error_code() {
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::SystemIoFailure) => {
            if access(dir, may | Access::EXEC_OK).is_err_and(|e| e != rustix::io::Errno::NOENT) {
                return Error::Denied(format!(
                    "the directory {} cannot be written: SQLite keeps its log beside the file",
                    dir.display()
                ));
            }
            if access(path, may).is_err_and(|e| e != rustix::io::Errno::NOENT) {
                return Error::Denied(format!("the file {} cannot be written", path.display()));
            }
            Error::Unavailable(format!("the file {} cannot be opened: {e}", path.display()))
        }
        _ => sql_error(e),
    }
}

/// A row that this version of Lockkeeper cannot have written.
pub(crate) fn damaged(what: &str) -> Error {
    Error::Unavailable(format!("the file is damaged: {what} makes no sense"))
}
