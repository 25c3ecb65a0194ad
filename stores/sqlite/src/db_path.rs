//! The path of the database: its real path, the identity of the file it leads to, and the files beside it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Result};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use crate::config::Options;
use crate::error::io_error;

/// The device and inode of a file. If a path leads to another one later, the file was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId(u64, u64);

impl FileId {
    pub fn new(dev: u64, ino: u64) -> Self {
        FileId(dev, ino)
    }

    /// `None` if there is no file.
    pub fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|meta| FileId(meta.dev(), meta.ino()))
    }
}

/// A database and its log: the inode and the creation time of each, because file systems reuse inodes. Zeros for a file
/// that does not exist.
pub(crate) type FilePair = [u64; 4];

/// The database and the log that are there now.
pub(crate) fn file_pair(database: &Path) -> FilePair {
    let flags = StatxFlags::INO | StatxFlags::BTIME;
    let one = |path: &Path| match statx(CWD, path, AtFlags::empty(), flags) {
        Ok(found) => {
            let born = found.stx_btime;
            [found.stx_ino, born.tv_sec.unsigned_abs().wrapping_mul(1_000_000_000) + u64::from(born.tv_nsec)]
        }
        Err(_) => [0, 0],
    };
    let ([a, b], [c, d]) = (one(database), one(&beside(database, "-wal")));
    [a, b, c, d]
}

/// The real path, so that a process that uses a symbolic link finds the same files beside the database.
pub(crate) fn resolve(options: &Options) -> Result<PathBuf> {
    let path = &options.path;
    if let Ok(real) = path.canonicalize() {
        return if real.is_dir() {
            Err(Error::invalid(format!("{} is a directory: a file is needed", real.display())))
        } else {
            Ok(real)
        };
    }
    resolve_missing(path, options, 0)
}

/// The real path of a file that does not exist yet.
fn resolve_missing(path: &Path, options: &Options, links: u32) -> Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| Error::invalid(format!("{} names no file", path.display())))?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    // A link to a file that does not exist yet: the other files are created beside the file, not beside the link.
    if let Ok(target) = fs::read_link(path) {
        return match links {
            40.. => Err(Error::invalid(format!("{} is a link that leads nowhere", path.display()))),
            _ => resolve_missing(&dir.join(target), options, links + 1),
        };
    }
    if options.create_dir {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|e| io_error("cannot make the directory", dir, &e))?;
    }
    let dir = dir.canonicalize().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Unavailable(format!(
            "the directory {} does not exist: make it first, or correct the path",
            dir.display()
        )),
        _ => io_error("cannot find the directory", dir, &e),
    })?;
    Ok(dir.join(name))
}

/// Refuses a database that is shared without its directory: by a hard link, or as a file that is mounted by itself, as
/// `-v locks.db:/c/locks.db` does. SQLite keeps the log and its file locks in files beside the database. The two sides
/// would have different ones, and each would have its own holders.
pub(crate) fn check_shared_with_directory(path: &Path) -> Result<()> {
    let Ok(meta) = fs::metadata(path) else { return Ok(()) };
    let dir = path.parent().unwrap_or(Path::new("/")).display();
    let refuse = |what: &str, instead: &str| {
        Err(Error::Unsupported(format!(
            "{} {what}: SQLite keeps its log and its locks in files beside it, so two processes that reach it by different \
             paths would each have locks of their own. {instead}",
            path.display()
        )))
    };
    if is_mount_point(path) {
        return refuse("is mounted by itself", "Share the directory that it is in, and not only the file");
    }
    if meta.nlink() > 1 {
        let instead =
            format!("Remove the other hard link, and share the directory {dir} or use a symbolic link");
        return refuse("has more than one hard link", &instead);
    }
    Ok(())
}

fn is_mount_point(path: &Path) -> bool {
    let root = StatxAttributes::MOUNT_ROOT;
    match statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS) {
        Ok(found) if found.stx_attributes_mask.contains(root) => found.stx_attributes.contains(root),
        // Linux before 5.8 does not report this attribute.
        _ => fs::read_to_string("/proc/self/mountinfo").is_ok_and(|table| is_listed(&table, path)),
    }
}

/// Whether a path is a mount point by the table in `/proc/self/mountinfo`, which writes blanks and some other characters in octal.
fn is_listed(table: &str, path: &Path) -> bool {
    let mut spelled = String::new();
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => spelled.push_str(&format!("\\{byte:03o}")),
            _ => spelled.push(char::from(*byte)),
        }
    }
    table.lines().any(|line| line.split(' ').nth(4) == Some(&spelled))
}

/// The file beside the database whose name has this suffix.
pub(crate) fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Gives another file the owner, group and mode of the database, as SQLite does with its own files. Best effort: without
/// the permission to do so the file stays private, and a user who cannot read it gets an error.
pub(crate) fn share_like(database: &Path, other: &Path) {
    let (Ok(model), Ok(made)) = (fs::metadata(database), fs::metadata(other)) else { return };
    // The group first: a user who may not change the owner may still set one of his own groups.
    if model.gid() != made.gid() {
        let _ = std::os::unix::fs::chown(other, None, Some(model.gid()));
    }
    if model.uid() != made.uid() {
        let _ = std::os::unix::fs::chown(other, Some(model.uid()), None);
    }
    let mut mode = model.mode() & 0o666;
    if made.is_dir() {
        // A user who may read the database may search the directory.
        mode |= (mode & 0o444) >> 2;
    }
    let _ = fs::set_permissions(other, Permissions::from_mode(mode));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_from_mountinfo() {
        let table =
            "22 28 0:20 / /sys rw - sysfs none rw\n45 28 8:1 /a /c/my\\040locks.db rw - ext4 /dev/sda rw\n";
        assert!(is_listed(table, Path::new("/c/my locks.db")));
        assert!(!is_listed(table, Path::new("/c")));
        assert!(is_mount_point(Path::new("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self/mountinfo")));
    }
}
