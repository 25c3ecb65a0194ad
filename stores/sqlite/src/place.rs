//! Where the file is: its real path, the file system it is on, and which file it was when it was opened.

use std::fs::{self, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Result};

use crate::Options;
use crate::fault::io_fault;

/// Which file a path leads to. A path that leads to another file later means that the file was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity(u64, u64);

impl Identity {
    pub fn new(dev: u64, ino: u64) -> Self {
        Identity(dev, ino)
    }

    /// `None`: there is no file.
    pub fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|meta| Identity(meta.dev(), meta.ino()))
    }
}

/// The real path, so that a process that comes by a symbolic link finds the same helpers beside the file.
pub(crate) fn find(options: &Options) -> Result<PathBuf> {
    let path = &options.path;
    if let Ok(real) = path.canonicalize() {
        return if real.is_dir() {
            Err(Error::invalid(format!("{} is a directory: a file is needed", real.display())))
        } else {
            Ok(real)
        };
    }
    let name = path.file_name().ok_or_else(|| Error::invalid(format!("{} names no file", path.display())))?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    if options.create_dir {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|e| io_fault("cannot make the directory", dir, &e))?;
    }
    let dir = dir.canonicalize().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Unavailable(format!(
            "the directory {} does not exist: make it first, or correct the path",
            dir.display()
        )),
        _ => io_fault("cannot find the directory", dir, &e),
    })?;
    Ok(dir.join(name))
}

/// The helper of the database that is called like it with `suffix` behind.
pub(crate) fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Lets those who may use the database use its helper, and nobody else, as SQLite does with its own. Best effort:
/// without the right to do so the helper stays private, and whoever cannot read it says so.
pub(crate) fn share_like(database: &Path, helper: &Path) {
    let (Ok(model), Ok(made)) = (fs::metadata(database), fs::metadata(helper)) else { return };
    // The group first: who may not give a file away may still give it to a group of his own.
    if model.gid() != made.gid() {
        let _ = std::os::unix::fs::chown(helper, None, Some(model.gid()));
    }
    if model.uid() != made.uid() {
        let _ = std::os::unix::fs::chown(helper, Some(model.uid()), None);
    }
    let mut mode = model.mode() & 0o666;
    if made.is_dir() {
        // Who may read the file may look into the directory.
        mode |= (mode & 0o444) >> 2;
    }
    let _ = fs::set_permissions(helper, Permissions::from_mode(mode));
}

const REMOTE: [(u64, &str); 14] = [
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x7461_636f, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0x6573_5546, "FUSE"),
];

/// The kind of file system, if other hosts may be on it, or a program that serves it as it likes.
pub(crate) fn remote(path: &Path) -> Result<Option<&'static str>> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let found = rustix::fs::statfs(dir).map_err(|e| io_fault("cannot look at", dir, &e.into()))?;
    // The magic number is signed on some machines and has 32 bits on all.
    let kind = found.f_type as u64 & 0xffff_ffff;
    Ok(REMOTE.iter().find(|(magic, _)| *magic == kind).map(|(_, name)| *name))
}

/// Refuses a file system that SQLite's locks do not work on between hosts, or notes that it was allowed.
pub(crate) fn check_file_system(path: &Path, options: &Options) -> Result<Option<String>> {
    match remote(path)? {
        None => Ok(None),
        Some(kind) if options.network_fs => Ok(Some(format!(
            "the file is on {kind}, which was allowed: if another host opens it, both may hold one lock at once"
        ))),
        Some(kind) => Err(Error::Unsupported(format!(
            "{} is on {kind}: SQLite's file locks and shared memory do not reach from host to host there, and two \
             hosts could hold one lock. Use a local disk for one host or another store for several; if only this host \
             uses it, add ?network_fs=allow",
            path.display()
        ))),
    }
}
