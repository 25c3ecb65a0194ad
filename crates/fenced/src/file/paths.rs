//! The paths of a fenced file: the file, its mark and its directory, with links resolved.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Result};

/// Where the file, its mark and its directory really are.
pub(super) struct FilePaths {
    pub dir: PathBuf,
    pub file: PathBuf,
    pub mark: PathBuf,
    pub name: OsString,
}

impl FilePaths {
    /// Follows links, so that all paths to one file lead to one mark. A path that is no plain file, or a file of several names, is refused.
    pub fn find(path: &Path) -> Result<FilePaths> {
        let invalid = |why: &str| Error::invalid(format!("{} {why}", path.display()));
        let path_there = match fs::canonicalize(path) {
            Ok(real) => real,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !path.is_symlink() => path.to_owned(),
            Err(e) => return Err(Error::Unavailable(format!("{} cannot be found: {e}", path.display()))),
        };
        let name = path_there.file_name().ok_or_else(|| invalid("is no name of a file"))?.to_owned();
        let parent = path_there.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = fs::canonicalize(parent).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                Error::invalid(format!("there is no directory {}: make it first", parent.display()))
            }
            _ => Error::Unavailable(format!("the directory {} cannot be found: {e}", parent.display())),
        })?;
        if name.as_bytes().starts_with(b".") && (ends(&name, ".fence") || ends(&name, ".new")) {
            return Err(invalid("is the name of a mark or of an unfinished write: choose another one"));
        }
        match fs::symlink_metadata(dir.join(&name)) {
            Ok(found) if !found.is_file() => return Err(invalid("is not a plain file")),
            // The other name would keep the old contents, and would have a mark of its own.
            Ok(found) if found.nlink() > 1 => {
                return Err(invalid("has several names (hard links): give it one"));
            }
            _ => {}
        }
        Ok(FilePaths { file: dir.join(&name), mark: dir.join(hidden_name(&name, ".fence")), dir, name })
    }

    /// Makes what was renamed here outlast a power cut.
    pub fn sync(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }

    pub fn describe(&self, what: &str, e: &io::Error) -> String {
        format!("{}: {what}: {e}", self.file.display())
    }

    /// Nothing has happened to the contents.
    pub fn error(&self, what: &str, e: &io::Error) -> Error {
        let text = self.describe(what, e);
        match e.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Error::Denied(format!(
                "{text}; its writers need the right to make files in {}",
                self.dir.display()
            )),
            io::ErrorKind::InvalidFilename => Error::Invalid(text),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Error::Limited(text)
            }
            _ => Error::Unavailable(text),
        }
    }
}

fn ends(name: &OsStr, with: &str) -> bool {
    name.as_bytes().ends_with(with.as_bytes())
}

/// `.NAME` and more: hidden, and never the name of a file that is fenced.
pub(super) fn hidden_name(name: &OsStr, more: &str) -> OsString {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(more);
    hidden
}
