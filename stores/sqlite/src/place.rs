//! Where the file is: its real path, the file system it is on, and which file it was when it was opened.

use std::fs::{self, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use lockkeeper_core::{Error, Result};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

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
    in_directory(path, options, 0)
}

/// The real path of a file that is not there yet.
fn in_directory(path: &Path, options: &Options, links: u32) -> Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| Error::invalid(format!("{} names no file", path.display())))?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    // A link to a file that is yet to be made: the helpers stand beside the file, and not beside the link.
    if let Ok(target) = fs::read_link(path) {
        return match links {
            40.. => Err(Error::invalid(format!("{} is a link that leads nowhere", path.display()))),
            _ => in_directory(&dir.join(target), options, links + 1),
        };
    }
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

/// Refuses a database that is reached without its directory: by a hard link, or as a file that is mounted by itself, as
/// `-v locks.db:/c/locks.db` does. SQLite keeps the log and the locks in files beside the database, and those would be
/// others: two sets of locks over one database, each with its own holder.
pub(crate) fn check_not_alone(path: &Path) -> Result<()> {
    let Ok(meta) = fs::metadata(path) else { return Ok(()) };
    let dir = path.parent().unwrap_or(Path::new("/")).display();
    let refuse = |what: &str, instead: &str| {
        Err(Error::Unsupported(format!(
            "{} {what}: SQLite keeps its log and its locks in files beside it, so two processes that come by different \
             ways would each have locks of their own. {instead}",
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
        // Linux before 5.8 does not say it there.
        _ => fs::read_to_string("/proc/self/mountinfo").is_ok_and(|table| is_listed(&table, path)),
    }
}

/// Whether a path is a mount point by the table in `/proc/self/mountinfo`, which spells blanks and the like in octal.
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

/// Those that keep what was synced over a power cut.
const DURABLE: [u64; 9] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0x2fc1_2fc1, // ZFS
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x3153_464a, // JFS
    0x5265_4973, // ReiserFS
    0x3434,      // NILFS
];

/// Why others do not, where there is something to say.
const FORGETFUL: [(u64, &str); 4] = [
    (0x0102_1994, "tmpfs, which forgets everything at a reboot"),
    (0x8584_58f6, "ramfs, which forgets everything at a reboot"),
    (
        0x794c_7630,
        "overlayfs, which may be volatile and goes away with its container: put the file on a volume",
    ),
    (0x4d44, "FAT, which a power cut can damage"),
];

/// What a file stands on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Medium {
    /// Other hosts may be on it, which was allowed.
    pub remote: bool,
    /// What was synced is still there after a power cut.
    pub durable: bool,
    /// What a user should know about it, the gravest first.
    pub notes: Vec<String>,
}

/// Refuses a file system that SQLite's locks do not work on between hosts, unless that was allowed, and looks whether it
/// is one of those that are known to keep what was synced.
pub(crate) fn check_file_system(path: &Path, options: &Options) -> Result<Medium> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let found = rustix::fs::statfs(dir).map_err(|e| io_fault("cannot look at", dir, &e.into()))?;
    // The magic number is signed on some machines and has 32 bits on all.
    let magic = found.f_type as u64 & 0xffff_ffff;
    let named =
        |list: &[(u64, &'static str)]| list.iter().find(|(one, _)| *one == magic).map(|(_, name)| *name);
    if let Some(kind) = named(&REMOTE) {
        if options.network_fs {
            let note = format!(
                "the file is on {kind}, which was allowed: if another host opens it, both may hold one lock at once"
            );
            return Ok(Medium { remote: true, durable: false, notes: vec![note] });
        }
        return Err(Error::Unsupported(format!(
            "{} is on {kind}: SQLite's file locks and shared memory do not reach from host to host there, and two \
             hosts could hold one lock. Use a local disk for one host or another store for several; if only this host \
             uses it, add ?network_fs=allow",
            path.display()
        )));
    }
    if DURABLE.contains(&magic) {
        return Ok(Medium { durable: true, ..Medium::default() });
    }
    let kind = named(&FORGETFUL).map_or_else(
        || format!("a file system ({magic:#x}) that is not known to keep what was synced over a power cut"),
        str::to_owned,
    );
    Ok(Medium { notes: vec![format!("the file is on {kind}")], ..Medium::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_is_found_in_the_table() {
        let table =
            "22 28 0:20 / /sys rw - sysfs none rw\n45 28 8:1 /a /c/my\\040locks.db rw - ext4 /dev/sda rw\n";
        assert!(is_listed(table, Path::new("/c/my locks.db")));
        assert!(!is_listed(table, Path::new("/c")));
        assert!(is_mount_point(Path::new("/proc")));
        assert!(!is_mount_point(Path::new("/proc/self/mountinfo")));
    }
}
