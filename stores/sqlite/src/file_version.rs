//! The version of the file: a file of another application, or of a newer Lockkeeper, is refused and left as it is.

use std::fs;
use std::path::Path;

use lockkeeper_core::{Error, Result};
use rusqlite::{Connection, OpenFlags};

use crate::busy_handler::busy_handler;
use crate::error::open_error;
use crate::statements;

/// The application id and the format version in the file header.
pub(crate) fn file_version(sql: &Connection) -> rusqlite::Result<(i64, i64)> {
    Ok((statements::pragma(sql, "application_id")?, statements::pragma(sql, "user_version")?))
}

pub(crate) fn check_version((application, version): (i64, i64), path: &Path) -> Result<()> {
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
pub(crate) fn check_foreign_file(path: &Path) -> Result<()> {
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
