//! What SQLite and the file system report, as the one table of outcomes knows it.

use std::io;
use std::path::Path;

use lockkeeper_core::Error;
use rusqlite::ErrorCode;
use rustix::fs::{Access, access};

/// A fault before anything was committed: it did not happen.
pub(crate) fn fault(e: rusqlite::Error) -> Error {
    let text = e.to_string();
    match e.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Error::Unavailable(format!(
            "the file is busy: its write lock was not to be had within {} s",
            crate::busy::STANDSTILL.as_secs()
        )),
        Some(ErrorCode::DiskFull) => Error::Unavailable("the disk is full".into()),
        Some(
            ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied,
        ) => Error::Denied(format!("the file cannot be written ({text})")),
        Some(ErrorCode::NotADatabase) => {
            Error::Unavailable(format!("the file is not an SQLite database ({text}); it was left as it is"))
        }
        Some(ErrorCode::DatabaseCorrupt) => Error::Unavailable(format!(
            "the file is damaged ({text}): restore it, or remove it to begin anew"
        )),
        _ => Error::Unavailable(format!("SQLite: {text}")),
    }
}

/// A fault of the commit itself. Where the write of the last page or its sync failed, the commit may be found on the
/// disk after a crash; nobody can say.
pub(crate) fn commit_fault(e: rusqlite::Error) -> Error {
    match e.sqlite_error_code() {
        Some(ErrorCode::SystemIoFailure) => {
            Error::Unknown(format!("the commit failed half-way ({e}): ask again with the same attempt"))
        }
        _ => fault(e),
    }
}

/// A fault of the file system.
pub(crate) fn io_fault(what: &str, path: &Path, e: &io::Error) -> Error {
    let text = format!("{what} {}: {e}", path.display());
    match e.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Error::Denied(text),
        _ => Error::Unavailable(text),
    }
}

/// SQLite says "unable to open" for many reasons; the one a user can mend is a missing right.
pub(crate) fn open_fault(e: rusqlite::Error, path: &Path) -> Error {
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
        _ => fault(e),
    }
}

/// A row that this version of Lockkeeper cannot have written.
pub(crate) fn damaged(what: &str) -> Error {
    Error::Unavailable(format!("the file is damaged: {what} makes no sense"))
}
