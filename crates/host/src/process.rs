//! Processes of this host: their identity, and whether they still run.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, PROC_SUPER_MAGIC, StatxAttributes, StatxFlags, fstatfs, statx};
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use crate::per_process::PerProcess;

/// A process, told apart from every other one of this boot: a pid alone is used again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its number in its pid namespace.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
    /// Its pid namespace, and its time namespace mixed in. The pids of another pid namespace mean nothing here; and
    /// /proc shows the start of a process shifted by the time namespace of the reader, so that across that border
    /// a living process could not be told apart from a dead one.
    pub namespace: u64,
}

/// Whether a process still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It does.
    Alive,
    /// It does not.
    Gone,
    /// It cannot be seen from here: it may.
    Unknown,
}

impl Process {
    /// This process; in the child of a fork the child.
    ///
    /// # Errors
    /// If /proc cannot be read now, for instance because no file descriptor is left. A later call may succeed.
    pub fn this() -> io::Result<&'static Process> {
        static THIS: PerProcess<Process> = PerProcess::new();
        THIS.get_or_try_init(|| {
            let pid = std::process::id();
            let stat = match fs::read_to_string("/proc/self/stat") {
                // Without /proc nothing can be said about other processes.
                Err(error) if is_absent(&error) => String::new(),
                read => read?,
            };
            // A /proc of another namespace calls this process by another number: then nothing can be said about others.
            let namespace = if stat.split(' ').next() == Some(&*pid.to_string()) { namespaces() } else { 0 };
            Ok(Process { pid, start: parse(&stat).map_or(0, |s| s.start), namespace })
        })
    }

    /// Whether it still runs, as far as can be seen from this process. If that is unknown, it may.
    pub fn life(&self) -> Liveness {
        let Ok(this) = Process::this() else { return Liveness::Unknown };
        if self.namespace != this.namespace || this.namespace == 0 {
            return Liveness::Unknown;
        }
        match fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => match parse(&stat) {
                Some(found) if found.start != self.start => Liveness::Gone,
                // The first thread is gone, but the process lives on in its others.
                Some(found) if found.dead && found.threads <= 1 => Liveness::Gone,
                Some(_) => Liveness::Alive,
                None => Liveness::Unknown,
            },
            // Where /proc hides other users' processes (hidepid), a signal still tells.
            Err(e) if vanished(&e) => match self.number().map(test_kill_process) {
                Some(Err(rustix::io::Errno::SRCH)) => Liveness::Gone,
                _ => Liveness::Unknown,
            },
            Err(_) => Liveness::Unknown,
        }
    }

    /// A descriptor that becomes readable when the process ends. `None` if it cannot be watched or has ended.
    pub fn watch(&self) -> Option<OwnedFd> {
        if self.life() != Liveness::Alive {
            return None;
        }
        let fd = pidfd_open(self.number()?, PidfdFlags::empty()).ok()?;
        // The pid may have been given to another process just before it was opened.
        (self.life() == Liveness::Alive).then_some(fd)
    }

    fn number(&self) -> Option<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw)
    }
}

/// There is no such file here, and will not be: no kernel support, no /proc, or a sandbox that keeps it from us. Anything else, such as want of
/// descriptors, passes.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
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

/// The identity of this boot of the machine: moments of two boots cannot be compared. `None`: it is masked. LXC and
/// systemd-nspawn mount a file of their own over it, with an identity of the container: by that, a container would take
/// what the rest of the machine wrote for the work of another boot.
///
/// # Errors
/// If it cannot be read at all.
pub fn boot_id() -> io::Result<Option<String>> {
    boot_id_at(Path::new("/proc/sys/kernel/random/boot_id"))
}

fn boot_id_at(path: &Path) -> io::Result<Option<String>> {
    let file = fs::File::open(path)?;
    let of_the_kernel = fstatfs(&file)?.f_type == PROC_SUPER_MAGIC && !is_mounted_over(&file);
    let text = io::read_to_string(file)?;
    Ok(of_the_kernel.then(|| text.trim().to_owned()))
}

/// Whether a file is mounted by itself, as far as the kernel says so (since Linux 5.8).
fn is_mounted_over(file: &fs::File) -> bool {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
        .is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// The name of this machine, for people to read.
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
    fn a_boot_id_that_is_no_file_of_the_kernel_is_masked() {
        assert_eq!(boot_id().unwrap().unwrap().len(), 36);
        let mask = std::env::temp_dir().join(format!("lockkeeper-boot-{}", std::process::id()));
        fs::write(&mask, boot_id().unwrap().unwrap()).unwrap();
        assert_eq!(boot_id_at(&mask).unwrap(), None);
        fs::remove_file(&mask).unwrap();
        assert!(boot_id_at(&mask).is_err());
    }

    #[test]
    fn a_child_is_alive_then_a_zombie_then_gone_and_its_pid_is_not_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let start = parse(&stat).unwrap().start;
        let process = Process { pid: child.id(), start, namespace: Process::this().unwrap().namespace };
        assert_eq!(process.life(), Liveness::Alive);
        let reused = Process { start: start + 1, ..process.clone() };
        assert_eq!(reused.life(), Liveness::Gone);
        let elsewhere = Process { namespace: process.namespace + 1, ..process.clone() };
        assert_eq!(elsewhere.life(), Liveness::Unknown);

        let fd = process.watch().unwrap();
        child.kill().unwrap();
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut fds, None).unwrap(), 1);
        assert_eq!(process.life(), Liveness::Gone, "a zombie holds nothing");
        child.wait().unwrap();
        assert_eq!(process.life(), Liveness::Gone);
        assert!(process.watch().is_none());
    }
}
