//! New contents that are not in place yet, and the removal of those that a crash left behind.

use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use super::paths::{FilePaths, hidden_name};
use super::same;

/// New contents that are not in their place yet. Dropped, they are removed.
///
/// The file stays locked while a process writes it: one without a lock was left behind by a crash.
pub(super) struct TempFile {
    file: File,
    path: Option<PathBuf>,
}

impl TempFile {
    /// Only its owner can read the replacement until then: the rights of the file are set after the last byte is written.
    pub fn new(paths: &FilePaths) -> io::Result<TempFile> {
        let mut options = File::options();
        options.write(true).create_new(true);
        if fs::symlink_metadata(&paths.file).is_ok() {
            options.mode(0o600);
        }
        for nth in 0u32.. {
            let name = hidden_name(&paths.name, &format!(".{}-{nth}.new", std::process::id()));
            let path = paths.dir.join(name);
            let file = match options.open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && nth < 10_000 => continue,
                Err(e) => return Err(e),
            };
            file.lock()?;
            // Another process may have removed it as left behind before it was locked.
            if same(&file, &path).unwrap_or(false) {
                return Ok(TempFile { file, path: Some(path) });
            }
        }
        Err(io::Error::other("there are too many unfinished writes"))
    }

    /// Writes all of it, to the disk. Returns the length.
    pub fn fill(&mut self, contents: &mut impl Read) -> io::Result<u64> {
        let length = io::copy(contents, &mut self.file)?;
        self.file.sync_all()?;
        Ok(length)
    }

    /// Takes the place of `old`, with its rights and its owner.
    pub fn replace(&mut self, old: &Path) -> io::Result<()> {
        if let Ok(old) = fs::metadata(old) {
            let new = self.file.metadata()?;
            if (old.uid(), old.gid()) != (new.uid(), new.gid()) {
                // Only root can give files away; others own what they write, as with every rename. A group of theirs is kept.
                let _ = fchown(&self.file, None, Some(old.gid()));
                let _ = fchown(&self.file, Some(old.uid()), None);
            }
            let mut mode = old.mode() & 0o7777;
            if self.file.metadata()?.gid() != old.gid() {
                // A file that the old group may read is not readable by another group, unless every user may read it.
                mode &= !0o070 | (mode & 0o007) << 3;
            }
            self.file.set_permissions(Permissions::from_mode(mode))?;
        }
        if let Some(path) = &self.path {
            fs::rename(path, old)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes the files of writers that were killed. A file that cannot be removed does no harm.
pub(super) fn sweep(paths: &FilePaths) {
    let prefix = hidden_name(&paths.name, ".");
    for entry in fs::read_dir(&paths.dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let middle =
            name.as_bytes().strip_prefix(prefix.as_bytes()).and_then(|rest| rest.strip_suffix(b".new"));
        if !middle.is_some_and(|middle| middle.iter().all(|b| b.is_ascii_digit() || *b == b'-')) {
            continue;
        }
        let Ok(file) = File::options().write(true).open(entry.path()) else { continue };
        if file.try_lock().is_ok() && same(&file, &entry.path()).unwrap_or(false) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
