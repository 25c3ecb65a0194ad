//! The examination of the file: how much room is left for it, and how large it is.

use async_trait::async_trait;
use lockkeeper_core::{ClockReading, Examination, Examine, Finding, Promise, Result, ServerReport};
use rustix::fs::{StatVfs, StatVfsMountFlags};

use crate::error::io_error;
use crate::store::SqliteStore;

/// With less room than this, the write-ahead log cannot grow through one busy checkpoint.
const LITTLE_ROOM: u64 = 16 << 20;
/// With less room than this, a transaction may fail at any moment.
const NO_ROOM: u64 = 256 << 10;

#[async_trait]
impl Examine for SqliteStore {
    async fn examine(&self) -> Result<Examination> {
        // On the worker's thread, because a disk may hang.
        let path = self.path().to_owned();
        self.call(move |_| {
            let dir = path.parent().unwrap_or(&path);
            let disk = rustix::fs::statvfs(dir).map_err(|e| io_error("cannot look at", dir, &e.into()))?;
            let size = |suffix: &str| {
                let mut file = path.clone().into_os_string();
                file.push(suffix);
                std::fs::metadata(file).map_or(0, |about| about.len())
            };
            let report = ServerReport::new(path.display().to_string())
                .fact("bytes", size(""))
                .fact("log_bytes", size("-wal"))
                .fact("free_bytes", room(&disk));
            let report = ServerReport { version: Some(rusqlite::version().to_owned()), ..report };
            Ok(Examination {
                servers: vec![report],
                findings: disk_findings(&disk, &dir.display().to_string()),
            })
        })
        .await
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        // Every process of the host has the same clock.
        Ok(Vec::new())
    }
}

/// How many bytes a process without privileges may still write.
fn room(disk: &StatVfs) -> u64 {
    disk.f_bavail.saturating_mul(disk.f_frsize)
}

fn disk_findings(disk: &StatVfs, dir: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let free = room(disk);
    if free < LITTLE_ROOM {
        let text = format!(
            "the disk of {dir} has {} KiB left: when it is full, no lock is granted or renewed",
            free >> 10
        );
        let full = if free < NO_ROOM {
            Finding::harm(Promise::Availability, text)
        } else {
            Finding::risk(Promise::Availability, text)
        };
        findings.push(full.change("free disk space", format!("{} KiB", free >> 10), "16 MiB or more"));
    }
    if disk.f_files > 0 && disk.f_favail == 0 {
        let text = format!(
            "the file system of {dir} has no inode left: no process that opens the store can wait for a lock"
        );
        findings.push(Finding::harm(Promise::Waiting, text).change("free inodes", "0", "1000 or more"));
    }
    if disk.f_flag.contains(StatVfsMountFlags::RDONLY) {
        let text = format!("the file system of {dir} is mounted read-only: no lock is granted or renewed");
        findings.push(
            Finding::harm(Promise::Availability, text)
                .change("the mount", "ro", "rw")
                .how("mount -o remount,rw"),
        );
    }
    findings
}
