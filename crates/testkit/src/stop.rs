//! Stops other processes for a test, at a moment at which they keep nothing from the others.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Sends SIGSTOP, and returns when each thread of the process has stopped: until then they run on, for a moment or for
/// longer on a busy machine.
///
/// # Panics
/// If there is no such process.
pub fn stop(pid: u32) {
    signal(pid, Signal::STOP);
    until_stopped(pid);
}

/// Returns when each thread of the process has stopped, for a process that stops itself.
///
/// # Panics
/// If there is no such process.
pub fn until_stopped(pid: u32) {
    while !each_thread_has_stopped(pid) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The same, between two transactions on this SQLite database: a process that is stopped inside one keeps the file busy
/// for all others until it continues.
///
/// # Panics
/// If there is no such process.
pub fn stop_between_transactions(pid: u32, database: &Path) {
    stop_without_locks(pid, &files_with_locks(database));
}

/// The files on which SQLite takes its locks on this database.
pub fn files_with_locks(database: &Path) -> Vec<PathBuf> {
    ["", "-shm"].map(|end| format!("{}{end}", database.display()).into()).into()
}

/// The same, at a moment at which the process has a write lock on none of the files: the others would wait for it.
///
/// # Panics
/// If there is no such process.
pub fn stop_without_locks(pid: u32, files: &[PathBuf]) {
    stop(pid);
    while has_write_lock(pid, files) {
        signal(pid, Signal::CONT);
        std::thread::sleep(Duration::from_millis(1));
        stop(pid);
    }
}

fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(pid, signal).expect("the process is there");
}

fn each_thread_has_stopped(pid: u32) -> bool {
    let stopped = |task: io::Result<fs::DirEntry>| {
        // A thread that has just ended has no such file.
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        Ok::<_, io::Error>(
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't', 'Z', 'X'])),
        )
    };
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there");
    tasks.into_iter().all(|task| stopped(task).unwrap_or(false))
}

/// Whether the process has a write lock on one of the files. A line of /proc/locks is `1: POSIX  ADVISORY  WRITE 4711
/// fe:01:1234 120 120`, with the pid and the device and inode of the file; a lock on a whole file is a FLOCK.
fn has_write_lock(pid: u32, files: &[PathBuf]) -> bool {
    let inodes: Vec<String> =
        files.iter().filter_map(|file| Some(fs::metadata(file).ok()?.ino().to_string())).collect();
    let locks = fs::read_to_string("/proc/locks").expect("the kernel lists the locks");
    locks.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, "WRITE", owner, file, ..] = words[..] else { return false };
        let inode = file.rsplit(':').next().unwrap_or_default();
        owner == pid.to_string() && inodes.iter().any(|of| of == inode)
    })
}
