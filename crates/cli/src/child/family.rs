//! The descendants of this process that left the command's process group (`setsid`, daemons, shells with job control).
//!
//! The group is reached by one call; these have to be looked for. This process is a subreaper, so every descendant
//! has a chain of parents that leads here, however often it forked.

use std::collections::{HashMap, HashSet};
use std::fs;

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relative {
    pub pid: i32,
    parent: i32,
    group: i32,
    /// Tells it apart from a later process with the same pid.
    start: u64,
}

/// Every living descendant of this process that is not in `group`, and is no watchdog.
pub fn escaped(group: Pid) -> Vec<Relative> {
    let all: HashMap<i32, Relative> = processes().filter_map(read).map(|r| (r.pid, r)).collect();
    let me = getpid().as_raw_pid();
    let mut children: HashMap<i32, Vec<Relative>> = HashMap::new();
    for relative in all.values() {
        children.entry(relative.parent).or_default().push(*relative);
    }
    let (mut found, mut seen, mut next) = (Vec::new(), HashSet::from([me]), vec![me]);
    while let Some(parent) = next.pop() {
        for relative in children.get(&parent).into_iter().flatten() {
            if seen.insert(relative.pid) {
                next.push(relative.pid);
                found.push(*relative);
            }
        }
    }
    found.retain(|r| r.group != group.as_raw_pid() && !super::watchdog::is_ours(r.pid));
    found
}

/// Sends `signal` to each of them, again and again until none is new: some may be forking right now.
pub fn signal_escaped(group: Pid, signal: Signal) {
    let mut reached = HashSet::new();
    for _ in 0..16 {
        let new: Vec<Relative> =
            escaped(group).into_iter().filter(|r| reached.insert((r.pid, r.start))).collect();
        if new.is_empty() {
            return;
        }
        new.iter().for_each(|r| send(r, signal));
    }
}

/// Sends `signal` to that very process, and not to one that was given its pid meanwhile.
pub fn send(relative: &Relative, signal: Signal) {
    let Some(pid) = Pid::from_raw(relative.pid) else { return };
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    if read(relative.pid).is_some_and(|now| now.start == relative.start) {
        let _ = pidfd_send_signal(fd, signal);
    }
}

/// The pids of all processes that can be seen.
pub fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// What `/proc` knows about a living process.
pub fn read(pid: i32) -> Option<Relative> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X" | "x") {
        return None;
    }
    let number = |i: usize| fields.get(i)?.parse().ok();
    Some(Relative { pid, parent: number(1)?, group: number(2)?, start: fields.get(19)?.parse().ok()? })
}
