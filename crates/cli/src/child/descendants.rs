//! Finds the descendants of a process in `/proc`, also those that left the command's process group (`setsid`, daemons, shells
//! with job control).
//!
//! One call reaches the process group; the others have to be looked for. `lockkeeper run` is a subreaper, so every
//! descendant has a chain of parents that leads to it, however often it forked.

use std::collections::{HashMap, HashSet};
use std::{fs, io};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

/// A living process, as `/proc` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessEntry {
    pub pid: i32,
    parent: i32,
    pub group: i32,
    /// Tells it apart from a later process with the same pid.
    start: u64,
}

/// Every living descendant of the process `root` among `all`.
pub fn descendants(root: i32, all: &[ProcessEntry]) -> Vec<ProcessEntry> {
    let mut children: HashMap<i32, Vec<ProcessEntry>> = HashMap::new();
    for relative in all {
        children.entry(relative.parent).or_default().push(*relative);
    }
    let (mut found, mut seen, mut next) = (Vec::new(), HashSet::from([root]), vec![root]);
    while let Some(parent) = next.pop() {
        for relative in children.get(&parent).into_iter().flatten() {
            if seen.insert(relative.pid) {
                next.push(relative.pid);
                found.push(*relative);
            }
        }
    }
    found
}

/// Every living descendant of this process that is not in `group`, and is not `watchdog`.
///
/// # Errors
/// Of [`all`].
pub fn escaped(group: Pid, watchdog: Option<Pid>) -> io::Result<Vec<ProcessEntry>> {
    let mut found = descendants(getpid().as_raw_pid(), &all()?);
    let watchdog = watchdog.map(Pid::as_raw_pid);
    found.retain(|r| r.group != group.as_raw_pid() && Some(r.pid) != watchdog);
    Ok(found)
}

/// Sends `signal` to each of them, again and again until none is new: some may be forking right now. If /proc cannot be read, this
/// reaches none of them, and [`escaped`] says so to the caller that asks whether they are gone.
pub fn signal_escaped(group: Pid, watchdog: Option<Pid>, signal: Signal) {
    let mut reached = HashSet::new();
    for _ in 0..16 {
        let found = escaped(group, watchdog).unwrap_or_default().into_iter();
        let new: Vec<ProcessEntry> = found.filter(|r| reached.insert((r.pid, r.start))).collect();
        if new.is_empty() {
            return;
        }
        new.iter().for_each(|r| send(r, signal));
    }
}

/// Sends `signal` to that very process, and not to one that was given its pid meanwhile.
pub fn send(relative: &ProcessEntry, signal: Signal) {
    let Some(pid) = Pid::from_raw(relative.pid) else { return };
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    if matches!(read(relative.pid), Ok(Some(now)) if now.start == relative.start) {
        let _ = pidfd_send_signal(fd, signal);
    }
}

/// All living processes that can be seen.
///
/// # Errors
/// If /proc cannot be read, for instance because no file descriptor is left. Then nothing is known: the caller must not take that for
/// "there is none".
pub fn all() -> io::Result<Vec<ProcessEntry>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        if let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            found.extend(read(pid)?);
        }
    }
    Ok(found)
}

/// What `/proc` knows about a living process. `None`: it has ended, or is hidden from this user (`hidepid`).
fn read(pid: i32) -> io::Result<Option<ProcessEntry>> {
    let stat = match fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(e) if is_hidden_or_gone(&e) => return Ok(None),
        Err(e) => return Err(e),
    };
    Ok(parse(pid, &stat))
}

fn is_hidden_or_gone(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
        || e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn parse(pid: i32, stat: &[u8]) -> Option<ProcessEntry> {
    let end = stat.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X" | "x") {
        return None;
    }
    let number = |i: usize| fields.get(i)?.parse().ok();
    Some(ProcessEntry { pid, parent: number(1)?, group: number(2)?, start: fields.get(19)?.parse().ok()? })
}
