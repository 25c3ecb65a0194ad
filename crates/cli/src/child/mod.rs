//! The command that runs under the lock, and everything it starts.
//!
//! - [`CommandProcess`]: starts it in its own process group, reports when it stops or ends, forwards signals.
//! - [`job`]: all of it together; [`capture`]: keeps what it prints.
//! - [`descendants`]: its descendants, also those that left the group. [`cgroup`]: all of them, as the kernel sees them.
//! - [`lease`]: until when it may run.
//! - [`supervisor`]: watches the command, and ends it before its lock is lost.
//! - [`shim`]: the process that starts the command, so that the kernel kills the command when `lockkeeper` dies.
//! - [`item`]: one command of several that run at the same time, each for an item of work.
//! - [`registry`]: which child belongs to which command, where several commands run at once.
//! - [`watchdog`]: a second process, started before the command, that ends it if `lockkeeper` is killed or stopped.
//! - [`termination`]: ends the command with everything that it has started.
//! - [`terminal`]: which process group may read from the terminal.

pub mod capture;
pub mod cgroup;
pub mod descendants;
pub mod item;
pub mod job;
pub mod lease;
pub mod registry;
pub mod shim;
pub mod supervisor;
pub mod terminal;
pub mod termination;
pub mod watchdog;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use capture::CommandPipes;
use descendants::ProcessEntry;
use lockkeeper::{BootInstant, Clock, SystemClock};
use rustix::fs::{Access, access};
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};
use watchdog::Watchdog;

/// At least this long from the start of one watchdog to the start of the next.
const BETWEEN_WATCHDOGS: Duration = Duration::from_millis(100);

/// A running command and its watchdog. Its process group has the same number as it.
#[derive(Debug)]
pub struct CommandProcess {
    pid: Pid,
    ended: bool,
    /// The variables that every process of the command has in its environment, unless it removed them.
    marks: [String; 2],
    /// `None`: it is gone, and another one has to be started.
    watchdog: Option<Watchdog>,
    /// When the last one was started, or could not be.
    watchdog_started: BootInstant,
    /// It was said that no other one can be started.
    reported_unwatched: bool,
    /// The watchdog with the order to kill what is left.
    leaving: Option<Pid>,
    /// Whether the last watchdog that ended has left no process. One that was killed has found nothing.
    killed_all: Option<bool>,
}

/// A change of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessChange {
    /// It was stopped by this signal; it may go on.
    Stopped(i32),
    /// It ended with this exit code, 128 + n for a signal.
    Ended(i32),
}

impl CommandProcess {
    /// Starts `command` in its own process group, in such a way that it dies when this process does. `watchdog` knows
    /// already when to act.
    ///
    /// Must be called on the main thread: "parent" means the thread here.
    pub fn start(
        command: &[impl AsRef<OsStr>],
        env: &[(&str, Option<String>)],
        pipes: Option<&CommandPipes>,
        mut watchdog: Watchdog,
        json: bool,
    ) -> io::Result<CommandProcess> {
        // An orphan below us becomes our child and not init's: so no process gets out of sight.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let mut shim = shim::command(command, json);
        if registry::are_several() {
            // One terminal for several commands would be read by whichever is quicker.
            shim.stdin(std::process::Stdio::null());
        }
        if let Some(pipes) = pipes {
            shim.stdout(pipes.out.try_clone()?).stderr(pipes.err.try_clone()?);
        }
        for (name, value) in env {
            match value {
                Some(value) => shim.env(name, value),
                None => shim.env_remove(name),
            };
        }
        let child = shim.process_group(0).spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a child has a pid");
        registry::add(pid);
        watchdog.send_group(pid);
        let watchdog_started = watchdog.started();
        let mark = |name: &str| {
            let value = env.iter().find(|(other, _)| *other == name).and_then(|(_, value)| value.as_deref());
            format!("{name}={}", value.unwrap_or_default())
        };
        Ok(CommandProcess {
            pid,
            ended: false,
            marks: [mark("LOCKKEEPER_NAME"), mark("LOCKKEEPER_FENCE")],
            watchdog: Some(watchdog),
            watchdog_started,
            reported_unwatched: false,
            leaving: None,
            killed_all: None,
        })
    }

    /// Its pid, and the number of its process group.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The change of its state since the last call. Also reaps the orphans that this process has adopted.
    pub fn change(&mut self) -> Option<ProcessChange> {
        self.read_watchdog_changes();
        let mut change = None;
        while let Some(status) = registry::next_change(self.pid) {
            if let Some(signal) = status.stopping_signal() {
                change = Some(ProcessChange::Stopped(signal));
            } else if let Some(code) = status.exit_status() {
                change = Some(ProcessChange::Ended(code));
            } else if let Some(signal) = status.terminating_signal() {
                change = Some(ProcessChange::Ended(crate::exit::by_signal(signal)));
            }
            self.ended |= matches!(change, Some(ProcessChange::Ended(_)));
        }
        change
    }

    /// A watchdog ends by itself when it has killed all. One that was stopped is of no use.
    fn read_watchdog_changes(&mut self) {
        for pid in [self.watchdog_pid(), self.leaving].into_iter().flatten() {
            while let Some(status) = registry::next_change(pid) {
                if status.exited() || status.signaled() {
                    self.killed_all = Some(status.exit_status() == Some(0));
                }
                if self.watchdog_pid() == Some(pid) {
                    self.lose_watchdog();
                }
            }
        }
    }

    /// The watchdog has ended or was stopped: either way it is of no use any more.
    fn lose_watchdog(&mut self) {
        if let Some(watchdog) = self.watchdog.take() {
            registry::remove(watchdog.pid());
            watchdog.kill();
        }
    }

    /// When another watchdog is to be started; `None`: there is one.
    pub fn watchdog_due(&self) -> Option<BootInstant> {
        // One that ends at once, again and again, must not keep us busy.
        self.watchdog.is_none().then(|| self.watchdog_started + BETWEEN_WATCHDOGS)
    }

    /// Tells the watchdog when to act, and starts another one if there is none.
    pub fn keep_watched(&mut self, act: BootInstant, start: impl FnOnce() -> io::Result<Watchdog>) {
        if self.watchdog_due().is_some_and(|due| SystemClock.now() >= due) {
            self.watchdog_started = SystemClock.now();
            match start() {
                Ok(mut watchdog) => {
                    tracing::warn!("the watchdog of the command was killed; another one was started");
                    watchdog.send_group(self.pid);
                    self.watchdog = Some(watchdog);
                }
                Err(_) if self.reported_unwatched => {}
                Err(e) => {
                    tracing::error!(
                        "the watchdog of the command was killed, and no other can be started yet: {e}"
                    );
                    self.reported_unwatched = true;
                }
            }
        }
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.send_deadline(act);
        }
    }

    /// All is done: the watchdog may go. Returns whether there is one.
    pub fn dismiss_watchdog(&mut self) -> bool {
        let Some(watchdog) = self.watchdog.take() else { return false };
        registry::remove(watchdog.pid());
        watchdog.dismiss();
        true
    }

    fn watchdog_pid(&self) -> Option<Pid> {
        self.watchdog.as_ref().map(Watchdog::pid)
    }

    /// Sends HUP to the command's first process, if that catches it: HUP would end a process that has not installed its handler yet.
    /// Returns whether it was sent.
    pub fn hang_up(&self) -> bool {
        // Until this process has collected its end, no other process has its pid.
        !self.ended && catches(self.pid, Signal::HUP) && kill_process(self.pid, Signal::HUP).is_ok()
    }

    /// Sends `signal` to everything in its process group.
    pub fn signal_group(&self, signal: Signal) {
        // An error means that no process is left in the group.
        let _ = kill_process_group(self.pid, signal);
    }

    /// Sends `signal` to the group and to every descendant that left it.
    pub fn signal_all(&self, signal: Signal) {
        self.signal_group(signal);
        descendants::signal_escaped(|| self.escaped(), signal);
    }

    /// The descendants that left its process group.
    fn escaped(&self) -> io::Result<Vec<ProcessEntry>> {
        descendants::escaped(self.pid, [self.watchdog_pid(), self.leaving], &self.marks)
    }

    /// Whether it and everything it started are gone. Not if that cannot be found out.
    pub fn all_gone(&self) -> bool {
        self.ended
            && test_kill_process_group(self.pid).is_err()
            && self.escaped().is_ok_and(|left| left.is_empty())
    }

    /// Whether this process cannot find out what the command has started.
    pub fn is_blind(&self) -> bool {
        self.escaped().is_err()
    }

    /// Leaves the rest to the watchdog, which has file descriptors of its own: it kills what is left, and ends.
    pub fn order_watchdog_to_kill(&mut self) {
        if let Some(watchdog) = self.watchdog.take() {
            self.killed_all = None;
            self.leaving = Some(watchdog.order_to_kill());
        }
    }

    /// Whether the last watchdog has found at its end that nothing is left. `None`: it has not ended.
    pub fn watchdog_killed_all(&self) -> Option<bool> {
        self.killed_all
    }
}

impl Drop for CommandProcess {
    fn drop(&mut self) {
        [Some(self.pid), self.watchdog_pid(), self.leaving].into_iter().flatten().for_each(registry::remove);
    }
}

/// Whether the process has a handler for the signal: `SigCgt` in its status, see proc(5).
fn catches(pid: Pid, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    caught & (1 << (signal.as_raw() - 1)) != 0
}

/// Why a command cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandUnusable {
    NotFound,
    NotExecutable,
}

/// Finds the command as the shell would. Called before the lock request: a typing error must not delay other processes.
pub fn find(command: &OsStr) -> Result<PathBuf, CommandUnusable> {
    let usable = |path: &Path| match access(path, Access::EXEC_OK) {
        Ok(()) if path.is_dir() => Err(CommandUnusable::NotExecutable),
        Ok(()) => Ok(path.to_owned()),
        Err(rustix::io::Errno::ACCESS) if path.exists() => Err(CommandUnusable::NotExecutable),
        Err(_) => Err(CommandUnusable::NotFound),
    };
    if command.is_empty() {
        return Err(CommandUnusable::NotFound);
    }
    if command.as_bytes().contains(&b'/') {
        return usable(Path::new(command));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut worst = CommandUnusable::NotFound;
    for dir in std::env::split_paths(&path) {
        match usable(&dir.join(command)) {
            Ok(found) => return Ok(found),
            Err(CommandUnusable::NotExecutable) => worst = CommandUnusable::NotExecutable,
            Err(CommandUnusable::NotFound) => {}
        }
    }
    Err(worst)
}
