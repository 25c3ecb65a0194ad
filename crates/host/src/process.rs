use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

/// A process, told apart from every other one of this boot: a pid alone is used again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its number in its pid namespace.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
    /// Its pid namespace, and its time namespace mixed in. The pids of another pid namespace mean nothing here; and
    /// /proc tells the start of a process shifted by the time namespace of whoever reads it, so that across that border
    /// the living could not be told from the dead.
    pub namespace: u64,
}

/// Whether a process still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It does.
    Alive,
    /// It does not.
    Gone,
    /// It cannot be seen from here: it may.
    Unknown,
}

impl Process {
    /// This process.
    pub fn this() -> &'static Process {
        static THIS: OnceLock<Process> = OnceLock::new();
        THIS.get_or_init(|| {
            let pid = std::process::id();
            let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
            // A /proc of another namespace calls this process by another number: then nothing can be said about others.
            let namespace = if stat.split(' ').next() == Some(&*pid.to_string()) { namespaces() } else { 0 };
            Process { pid, start: parse(&stat).map_or(0, |s| s.start), namespace }
        })
    }

    /// Whether it still runs, as far as can be seen from this process. In doubt it may.
    pub fn life(&self) -> Life {
        let this = Process::this();
        if self.namespace != this.namespace || this.namespace == 0 {
            return Life::Unknown;
        }
        match fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => match parse(&stat) {
                Some(found) if found.start != self.start => Life::Gone,
                // The first thread is gone, but the process lives on in its others.
                Some(found) if found.dead && found.threads <= 1 => Life::Gone,
                Some(_) => Life::Alive,
                None => Life::Unknown,
            },
            // Where /proc hides other users' processes (hidepid), a signal still tells.
            Err(e) if vanished(&e) => match self.number().map(test_kill_process) {
                Some(Err(rustix::io::Errno::SRCH)) => Life::Gone,
                _ => Life::Unknown,
            },
            Err(_) => Life::Unknown,
        }
    }

    /// A descriptor that becomes readable when the process ends. `None` if it cannot be watched or has ended.
    pub fn watch(&self) -> Option<OwnedFd> {
        if self.life() != Life::Alive {
            return None;
        }
        let fd = pidfd_open(self.number()?, PidfdFlags::empty()).ok()?;
        // The pid may have been given to somebody else just before it was opened.
        (self.life() == Life::Alive).then_some(fd)
    }

    fn number(&self) -> Option<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw)
    }
}

fn vanished(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

struct Stat {
    dead: bool,
    threads: u64,
    start: u64,
}

/// The fields after the command's name, which may itself hold spaces and brackets.
fn parse(stat: &str) -> Option<Stat> {
    let rest = &stat[stat.rfind(')')? + 1..];
    let fields: Vec<&str> = rest.split_whitespace().collect();
    Some(Stat {
        dead: matches!(*fields.first()?, "Z" | "X" | "x"),
        threads: fields.get(17)?.parse().ok()?,
        start: fields.get(19)?.parse().ok()?,
    })
}

/// The numbers of namespaces have 32 bits; together they stay below 2^62, which every store can hold.
fn namespaces() -> u64 {
    let number = |kind: &str| -> u64 {
        let link = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
        let text = link.to_string_lossy();
        text.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0)
    };
    match number("pid") {
        0 => 0,
        pid => pid ^ (number("time") << 24),
    }
}

/// The identity of this boot of the machine: moments of two boots cannot be compared.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// What this machine is called, for people to read.
pub fn host_name() -> String {
    let uname = rustix::system::uname();
    let name: String =
        uname.nodename().to_string_lossy().chars().filter(|c| !c.is_control()).take(64).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_alive_then_a_zombie_then_gone_and_its_pid_is_not_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let start = parse(&stat).unwrap().start;
        let process = Process { pid: child.id(), start, namespace: Process::this().namespace };
        assert_eq!(process.life(), Life::Alive);
        let reused = Process { start: start + 1, ..process.clone() };
        assert_eq!(reused.life(), Life::Gone);
        let elsewhere = Process { namespace: process.namespace + 1, ..process.clone() };
        assert_eq!(elsewhere.life(), Life::Unknown);

        let fd = process.watch().unwrap();
        child.kill().unwrap();
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut fds, None).unwrap(), 1);
        assert_eq!(process.life(), Life::Gone, "a zombie holds nothing");
        child.wait().unwrap();
        assert_eq!(process.life(), Life::Gone);
        assert!(process.watch().is_none());
    }
}
