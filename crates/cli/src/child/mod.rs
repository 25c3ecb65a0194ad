//! The command that runs under the lock, and everything it starts.
//!
//! - [`Child`]: starts it in its own process group, tells when it stops or ends, passes signals on.
//! - [`job`]: all of it together; [`capture`]: keeps what it prints.
//! - [`family`]: its descendants, also those that left the group.
//! - [`supervise`]: keeps an eye on it, and ends it before its lock is gone.
//! - [`shim`]: what it is started through, so that it dies with us.
//! - [`watchdog`]: a second process that ends it if we are killed or stopped.
//! - [`terminal`]: who may read from the terminal.

pub mod capture;
pub mod family;
pub mod job;
pub mod shim;
pub mod supervise;
pub mod terminal;
pub mod watchdog;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use capture::Pipes;
use rustix::fs::{Access, access};
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, wait};

/// A running command. Its process group has the same number as it.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    ended: bool,
}

/// What happened to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was stopped by this signal; it may go on.
    Stopped(i32),
    /// It ended with this exit code, 128 + n for a signal.
    Ended(i32),
}

impl Child {
    /// Starts `command` in its own process group, in such a way that it dies when this process does.
    ///
    /// Must be called on the main thread: "parent" means the thread here.
    pub fn start(
        command: &[impl AsRef<OsStr>],
        env: &[(&str, String)],
        pipes: Option<&Pipes>,
    ) -> io::Result<Child> {
        // Whoever is orphaned below us becomes our child and not init's: so nobody gets out of sight.
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
        let mut shim = shim::command(command);
        let start = |c: &mut Command| {
            if let Some(pipes) = pipes {
                c.stdout(pipes.out.try_clone()?).stderr(pipes.err.try_clone()?);
            }
            c.envs(env.iter().map(|(k, v)| (k, v))).process_group(0).spawn()
        };
        let child = match start(&mut shim) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // No /proc: then without the shim.
                let mut plain = Command::new(&command[0]);
                start(plain.args(&command[1..]))?
            }
            other => other?,
        };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        Ok(Child { pid: pid.expect("a child has a pid"), ended: false })
    }

    /// Its pid, and the number of its process group.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// What happened to it since the last call. Also buries the orphans that became ours.
    pub fn change(&mut self) -> Option<Change> {
        let mut change = None;
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if pid != self.pid {
                continue;
            }
            if let Some(signal) = status.stopping_signal() {
                change = Some(Change::Stopped(signal));
            } else if let Some(code) = status.exit_status() {
                change = Some(Change::Ended(code));
            } else if let Some(signal) = status.terminating_signal() {
                change = Some(Change::Ended(crate::exit::by_signal(signal)));
            }
            self.ended |= matches!(change, Some(Change::Ended(_)));
        }
        change
    }

    /// Sends `signal` to everything in its process group.
    pub fn signal_group(&self, signal: Signal) {
        // An error means that nobody is left in it.
        let _ = kill_process_group(self.pid, signal);
    }

    /// Sends `signal` to the group and to every descendant that left it.
    pub fn signal_all(&self, signal: Signal) {
        self.signal_group(signal);
        family::signal_escaped(self.pid, signal);
    }

    /// Whether it and everything it started are gone.
    pub fn all_gone(&self) -> bool {
        self.ended && test_kill_process_group(self.pid).is_err() && family::escaped(self.pid).is_empty()
    }
}

/// Why a command cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    NotFound,
    NotExecutable,
}

/// Finds the command as the shell would. Asked before the lock is: a typing error should not hold anybody up.
pub fn find(command: &OsStr) -> Result<PathBuf, Unusable> {
    let usable = |path: &Path| match access(path, Access::EXEC_OK) {
        Ok(()) if path.is_dir() => Err(Unusable::NotExecutable),
        Ok(()) => Ok(path.to_owned()),
        Err(rustix::io::Errno::ACCESS) if path.exists() => Err(Unusable::NotExecutable),
        Err(_) => Err(Unusable::NotFound),
    };
    if command.is_empty() {
        return Err(Unusable::NotFound);
    }
    if command.as_bytes().contains(&b'/') {
        return usable(Path::new(command));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut worst = Unusable::NotFound;
    for dir in std::env::split_paths(&path) {
        match usable(&dir.join(command)) {
            Ok(found) => return Ok(found),
            Err(Unusable::NotExecutable) => worst = Unusable::NotExecutable,
            Err(Unusable::NotFound) => {}
        }
    }
    Err(worst)
}
