//! The profile: which file systems the store accepts, and the guarantees that follow.

use std::path::Path;
use std::time::Duration;

use lockkeeper_core::faults::Deployment;
use lockkeeper_core::{Error, Finding, LimitSupport, Profile, Promise, Result, WaitOrder};
use lockkeeper_host::SystemClock;

use crate::config::Options;
use crate::error::io_error;
use crate::wake_pipe::{POLL, SILENCE};

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

/// File systems whose synced writes survive a power cut.
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

/// Other file systems, and why synced writes may be lost there.
const NOT_DURABLE: [(u64, &str); 4] = [
    (0x0102_1994, "tmpfs, which forgets everything at a reboot"),
    (0x8584_58f6, "ramfs, which forgets everything at a reboot"),
    (
        0x794c_7630,
        "overlayfs, which may be volatile and goes away with its container: put the file on a volume",
    ),
    (0x4d44, "FAT, which a power cut can damage"),
];

/// The file system that the file is stored on.
#[derive(Clone, Debug, Default)]
pub(crate) struct StorageInfo {
    /// A network file system, which the options allow.
    pub remote: bool,
    /// Synced writes survive a power cut.
    pub durable: bool,
    /// Missing guarantees of it, the gravest first.
    pub findings: Vec<Finding>,
}

/// Refuses a network file system unless the options allow it, and checks whether the file system is known to keep synced
/// writes.
pub(crate) fn check_file_system(path: &Path, options: &Options) -> Result<StorageInfo> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let found = rustix::fs::statfs(dir).map_err(|e| io_error("cannot look at", dir, &e.into()))?;
    // The magic number is signed on some machines and has 32 bits on all.
    let magic = found.f_type as u64 & 0xffff_ffff;
    let named =
        |list: &[(u64, &'static str)]| list.iter().find(|(one, _)| *one == magic).map(|(_, name)| *name);
    if let Some(kind) = named(&REMOTE) {
        if options.network_fs {
            let text = format!(
                "the file is on {kind}, which was allowed: if another host opens it, both may hold one lock at once, and \
                 synced writes may be lost"
            );
            let remote = Finding::risk(Promise::Durability, text).change("the path", kind, "a local disk");
            return Ok(StorageInfo { remote: true, durable: false, findings: vec![remote] });
        }
        return Err(Error::Unsupported(format!(
            "{} is on {kind}: SQLite's file locks and shared memory do not reach from host to host there, and two \
             hosts could hold one lock. Use a local disk for one host or another store for several; if only this host \
             uses it, add ?network_fs=allow",
            path.display()
        )));
    }
    if DURABLE.contains(&magic) {
        return Ok(StorageInfo { durable: true, ..StorageInfo::default() });
    }
    let kind = named(&NOT_DURABLE).map_or_else(
        || format!("a file system ({magic:#x}) that is not known to keep what was synced over a power cut"),
        str::to_owned,
    );
    let lossy = Finding::risk(Promise::Durability, format!("the file is on {kind}"))
        .set("the path", "a file on a local disk with ext4, XFS or Btrfs");
    Ok(StorageInfo { findings: vec![lossy], ..StorageInfo::default() })
}

impl StorageInfo {
    /// The guarantees of a store on this file system.
    pub fn profile(&self) -> Profile {
        // A stopped waiter counts as alive for SILENCE; then the poll of the next one finds the lock.
        let wake = SILENCE + POLL * 6 / 5;
        let mut findings = self.findings.clone();
        findings.extend([
            Finding::hint(
                Promise::Exclusion,
                "for the processes of one host: the file must be on a local disk",
            ),
            Finding::hint(
                Promise::Waiting,
                format!(
                    "if the first waiter is stopped (SIGSTOP, a debugger), the next is granted the lock after up to {:.1} s",
                    wake.as_secs_f64()
                ),
            ),
            Finding::hint(
                Promise::Exclusion,
                "a holder that is paused for longer than its ttl may be late: check the fence at the resource",
            ),
            Finding::hint(
                Promise::Exclusion,
                "a lock whose process ends is free at once, also if the process meant to keep it",
            ),
        ]);
        if SystemClock::shift() != 0 {
            findings.push(Finding::hint(
                Promise::Exclusion,
                "this process runs in a time namespace: its offset is subtracted, so that all processes agree on deadlines",
            ));
        }
        let deployment = match self {
            StorageInfo { remote: true, .. } => Deployment::SqliteNetwork,
            StorageInfo { durable: true, .. } => Deployment::Sqlite,
            _ => Deployment::SqliteVolatile,
        };
        Profile {
            waiting: WaitOrder::Queue,
            wake: wake + Duration::from_millis(100),
            shared: true,
            permits: true,
            multi_name: true,
            reentry: true,
            deadlocks: true,
            lock_delay: true,
            min_hold: true,
            watch: true,
            revoke: true,
            records: true,
            limits: LimitSupport::Native,
            findings,
            ..Profile::deployed("sqlite", vec![deployment])
        }
    }
}
