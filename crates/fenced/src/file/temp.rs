use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use super::place::{Place, beside};
use super::same;

/// New contents that are not in their place yet. Dropped, they are removed.
///
/// It stays locked while somebody writes it: one that is not has been left behind by a crash.
pub(super) struct Temp {
    file: File,
    path: Option<PathBuf>,
}

impl Temp {
    /// What takes the place of a file is for its owner's eyes until then: the rights of the file are set when all is written.
    pub fn new(place: &Place) -> io::Result<Temp> {
        let mut options = File::options();
        options.write(true).create_new(true);
        if fs::symlink_metadata(&place.file).is_ok() {
            options.mode(0o600);
        }
        for nth in 0u32.. {
            let name = beside(&place.name, &format!(".{}-{nth}.new", std::process::id()));
            let path = place.dir.join(name);
            let file = match options.open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && nth < 10_000 => continue,
                Err(e) => return Err(e),
            };
            file.lock()?;
            // Somebody who swept took it for left behind, before it was locked.
            if same(&file, &path).unwrap_or(false) {
                return Ok(Temp { file, path: Some(path) });
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
                // Only root can give files away; others own what they write, as with every rename.
                let _ = fchown(&self.file, Some(old.uid()), Some(old.gid()));
            }
            self.file.set_permissions(Permissions::clone(&old.permissions()))?;
        }
        if let Some(path) = &self.path {
            fs::rename(path, old)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes what writers have left behind that were killed. What cannot be removed does no harm.
pub(super) fn sweep(place: &Place) {
    let prefix = beside(&place.name, ".");
    for entry in fs::read_dir(&place.dir).into_iter().flatten().flatten() {
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
