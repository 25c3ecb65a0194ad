//! Finds the descendants of a process in `/proc`, also those that left the command's process group (`setsid`, daemons, shells
//! with job control).
//!
//! One call reaches the process group; the others have to be looked for. `lockkeeper run` is a subreaper, so every
//! descendant has a chain of parents that leads to it, however often it forked.

use std::collections::{HashMap, HashSet};
use std::fs;

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
pub fn escaped(group: Pid, watchdog: Option<Pid>) -> Vec<ProcessEntry> {
    let mut found = descendants(getpid().as_raw_pid(), &all());
    let watchdog = watchdog.map(Pid::as_raw_pid);
    found.retain(|r| r.group != group.as_raw_pid() && Some(r.pid) != watchdog);
    found
}

/// Sends `signal` to each of them, again and again until none is new: some may be forking right now.
pub fn signal_escaped(group: Pid, watchdog: Option<Pid>, signal: Signal) {
    let mut reached = HashSet::new();
    for _ in 0..16 {
        let found = escaped(group, watchdog).into_iter();
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
    if read(relative.pid).is_some_and(|now| now.start == relative.start) {
        let _ = pidfd_send_signal(fd, signal);
    }
}

/// All living processes that can be seen.
pub fn all() -> Vec<ProcessEntry> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| read(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// The facts in `/proc` about a living process.
fn read(pid: i32) -> Option<ProcessEntry> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X" | "x") {
        return None;
    }
    let number = |i: usize| fields.get(i)?.parse().ok();
    Some(ProcessEntry { pid, parent: number(1)?, group: number(2)?, start: fields.get(19)?.parse().ok()? })
}
