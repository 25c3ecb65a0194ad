//! Finds the descendants of a process in `/proc`, also those that left the command's process group (`setsid`, daemons, shells
//! with job control).
//!
//! One call reaches the process group; the others have to be looked for. `lockkeeper run` is a subreaper, so every
//! descendant has a chain of parents that leads to it, however often it forked.

use std::collections::{HashMap, HashSet};
use std::{fs, io};

use super::registry;
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

/// Every living descendant of this process that is not in the command's group, and is not its watchdog. Where several commands run:
/// only those that belong to this one, by their parents, or, if they have lost them, by the `marks` in their environment.
///
/// # Errors
/// Of [`all`].
pub fn escaped(command: Pid, watchdogs: [Option<Pid>; 2], marks: &[String]) -> io::Result<Vec<ProcessEntry>> {
    let all = all()?;
    let mut found = descendants(getpid().as_raw_pid(), &all);
    let group = command.as_raw_pid();
    found.retain(|r| r.group != group && Some(r.pid) != watchdogs[0].map(Pid::as_raw_pid));
    if registry::are_several() {
        // Also if no other runs now: one that has ended may have left processes, which are not this command's.
        let others = registry::others([Some(command), watchdogs[0], watchdogs[1]]);
        let own: HashSet<i32> = descendants(group, &all).iter().map(|r| r.pid).collect();
        let foreign: HashSet<i32> =
            others.iter().flat_map(|pid| descendants(*pid, &all)).map(|r| r.pid).collect();
        found.retain(|r| {
            let other = foreign.contains(&r.pid) || others.contains(&r.pid) || others.contains(&r.group);
            own.contains(&r.pid) || (!other && is_marked(r.pid, marks))
        });
    }
    Ok(found)
}

/// Whether the process has all these entries in its environment.
pub fn is_marked(pid: i32, marks: &[String]) -> bool {
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let has = |mark: &String| environ.split(|b| *b == 0).any(|entry| entry == mark.as_bytes());
    !marks.is_empty() && marks.iter().all(has)
}

/// Sends `signal` to each of those that `escaped` finds, again and again until none is new: some may be forking right now. If /proc
/// cannot be read, this reaches none of them, and [`escaped`] reports that to the caller that asks whether they are gone.
pub fn signal_escaped(escaped: impl Fn() -> io::Result<Vec<ProcessEntry>>, signal: Signal) {
    let mut reached = HashSet::new();
    for _ in 0..16 {
        let found = escaped().unwrap_or_default().into_iter();
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

/// The facts in `/proc` about a living process. `None`: it has ended, or is hidden from this user (`hidepid`).
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
