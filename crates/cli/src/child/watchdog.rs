//! The watchdog: a second process that ends the command when `lockkeeper run` cannot, because it was killed, or stopped past
//! the deadline.
//!
//! The kernel kills the command itself when `run` dies (see [`super::shim`]), but not what the command had started; and while `run` is
//! stopped, no process acts at all. So no command starts before its watchdog. `run` sends it through a pipe the process group of
//! the command and the time to act: a little before the deadline, and again whenever the deadline moves. When that time comes, or
//! the pipe is closed without a last message, the watchdog kills the process group, the descendants of `run`, every process with the
//! name and fence of the lock in its environment, and the control group of the command where there is one.
//!
//! Each watches the other: `run` is the parent of the watchdog, and starts another one if it ends or is stopped.

use std::ffi::OsString;
use std::io::{self, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use lockkeeper::{BootInstant, Clock, Fence, LockName, SystemClock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, kill_process, kill_process_group, waitpid};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::cgroup::{self, Cgroup};
use super::descendants::{self, ProcessEntry};
use super::registry;

/// The first word on its command line.
pub const SUBCOMMAND: &str = "__watchdog";
/// A command that has run for this long gets a control group of its own. Moving a process into one may cost the kernel 10 ms,
/// which a shorter command should not pay.
const CGROUP_AFTER: Duration = Duration::from_millis(50);
/// So long before it acts it looks for processes in other groups: that takes its time where there are many.
const AHEAD: Duration = Duration::from_millis(100);
/// The pause after a wait that the kernel did not do, for want of memory.
const POLL_AGAIN: Duration = Duration::from_millis(1);
/// A process that SIGKILL does not end in this time hangs in the kernel.
const GIVE_UP: Duration = Duration::from_secs(10);
/// The last word on its command line, if its parent runs other commands too.
const ONE_OF_MANY: &str = "one-of-many";
/// The last message of `run`: all is done.
const GOOD_BYE: &str = "good-bye";

/// The end of `run`: what it knows of its watchdog.
#[derive(Debug)]
pub struct Watchdog {
    pid: Pid,
    pipe: PipeWriter,
    /// The deadline that `run` sent to the watchdog last.
    sent_deadline: Option<BootInstant>,
    started: BootInstant,
}

impl Watchdog {
    /// Starts one for the command that runs under this lock. Where several commands run at once, it leaves the others alone.
    pub fn start(name: &LockName, fence: Fence) -> io::Result<Self> {
        let mut watchdog = Watchdog::start_early()?;
        watchdog.send_lock(name, fence);
        Ok(watchdog)
    }

    /// Starts one before the lock is granted: its start takes as long as the request to the store. It kills nothing until it has been
    /// sent the lock that it is for.
    pub fn start_early() -> io::Result<Self> {
        let (reader, pipe) = io::pipe()?;
        // A watchdog that does not read must not stop the one who writes.
        fcntl_setfl(&pipe, OFlags::NONBLOCK)?;
        let child = Command::new("/proc/self/exe")
            .arg0("lockkeeper")
            .args([SUBCOMMAND, &getpid().as_raw_pid().to_string()])
            .args(registry::are_several().then_some(ONE_OF_MANY))
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Its own group: it must not end with the one it watches, or with ours.
            .process_group(0)
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a child has a pid");
        registry::add(pid);
        Ok(Watchdog { pid, pipe, sent_deadline: None, started: SystemClock.now() })
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    pub fn started(&self) -> BootInstant {
        self.started
    }

    /// Whether it still runs, or can be taken for that.
    pub fn is_running(&self) -> bool {
        let runs = matches!(waitpid(Some(self.pid), WaitOptions::NOHANG), Ok(None));
        if !runs {
            registry::remove(self.pid);
        }
        runs
    }

    /// Tells it which lock the command runs under.
    pub fn send_lock(&mut self, name: &LockName, fence: Fence) {
        self.send(&format!("lock {fence} {name}"));
    }

    /// Tells it the variable that marks the processes of the command, in place of the lock's name and fence.
    pub fn send_mark(&mut self, variable: &str) {
        self.send(&format!("mark {variable}"));
    }

    /// Tells it the directory that `run` removes at its end, for the case that `run` is killed.
    pub fn send_private_dir(&mut self, dir: &str) {
        self.send(&format!("dir {dir}"));
    }

    /// Tells it which process group the command has.
    pub fn send_group(&mut self, group: Pid) {
        self.send(&format!("group {}", group.as_raw_pid()));
    }

    /// Tells it when to act, if that has moved.
    pub fn send_deadline(&mut self, at: BootInstant) {
        if self.sent_deadline != Some(at) {
            self.sent_deadline = Some(at);
            self.send(&format!("act {}", at.as_nanos()));
        }
    }

    /// All is done; it may go.
    pub fn dismiss(mut self) {
        self.send(GOOD_BYE);
    }

    /// It is to kill everything now. Its pid: it ends when nothing is left.
    pub fn order_to_kill(mut self) -> Pid {
        self.send_deadline(SystemClock.now());
        self.pid
    }

    /// One that does not read is of no use: it is ended, and its end is seen as any other.
    fn send(&mut self, message: &str) {
        if self.pipe.write_all(format!("{message}\n").as_bytes()).is_err() {
            self.kill();
        }
    }

    pub fn kill(&self) {
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

/// The watchdog itself.
pub fn main(words: impl Iterator<Item = OsString>) -> i32 {
    let words: Vec<OsString> = words.collect();
    let word = |i: usize| words.get(i).and_then(|word| word.to_str());
    let run = word(0).and_then(|w| w.parse().ok()).and_then(Pid::from_raw);
    let Some(run) = run else {
        return lockkeeper::Outcome::Invalid.exit_code().into();
    };
    let mut watched = WatchedCommand {
        run,
        marks: Vec::new(),
        tag: String::new(),
        several: word(1) == Some(ONE_OF_MANY),
        group: None,
        cgroup: None,
        private_dir: None,
    };
    // Made now: at its deadline there may be no descriptor left on the whole machine. Without it this watchdog is of no use, and `run`
    // sees its end and starts another one.
    let Ok(mut messages) = MessageReader::new() else {
        return lockkeeper::Outcome::Unavailable.exit_code().into();
    };
    let act = stand_by(&mut watched, &mut messages);
    if watched.marks.is_empty() {
        // There never was a grant, so there is no command.
        return 0;
    }
    // A watchdog before this one may have made it.
    watched.cgroup = watched.cgroup.take().or_else(|| Cgroup::find(&watched.tag));
    let all_gone = act.is_none_or(|known| watched.end(known));
    if let Some(cgroup) = watched.cgroup.take() {
        cgroup.remove();
    }
    if let Some(dir) = watched.private_dir.filter(|_| getppid() != Some(run)) {
        let _ = std::fs::remove_dir_all(dir);
    }
    i32::from(!all_gone)
}

/// The watched command.
struct WatchedCommand {
    run: Pid,
    /// The variables that every process of the command has in its environment, unless it was taken out.
    marks: Vec<String>,
    tag: String,
    /// Whether other descendants of `run` belong to other commands.
    several: bool,
    group: Option<Pid>,
    cgroup: Option<Cgroup>,
    /// A directory of `run`, which `run` can no longer remove if it is dead.
    private_dir: Option<PathBuf>,
}

impl WatchedCommand {
    /// Every living process that belongs to the command.
    fn members(&self) -> io::Result<Vec<ProcessEntry>> {
        let all = descendants::all()?;
        let me = getpid().as_raw_pid();
        // Once `run` is dead its children are those of another process.
        let root = if self.several { self.group } else { Some(self.run) };
        let root = root.filter(|_| getppid() == Some(self.run));
        let mut found = root.map_or(Vec::new(), |root| descendants::descendants(root.as_raw_pid(), &all));
        let group = self.group.map(Pid::as_raw_pid);
        found.extend(
            all.iter().filter(|r| Some(r.group) == group || descendants::is_marked(r.pid, &self.marks)),
        );
        found.retain(|r| r.pid != me && r.pid != self.run.as_raw_pid());
        Ok(found)
    }

    /// Puts the command and everything that it has started into a control group, where that may be.
    fn make_cgroup(&mut self) {
        self.cgroup = Cgroup::make(&self.tag);
        if let Some(cgroup) = &self.cgroup {
            cgroup.adopt(|| self.members().unwrap_or_default().iter().map(|r| r.pid).collect());
        }
    }

    /// Kills everything, those that are known already first, until nothing is left. Returns whether that is so.
    fn end(&self, known: Vec<ProcessEntry>) -> bool {
        let give_up = SystemClock.now() + GIVE_UP;
        let mut left = known;
        loop {
            if let Some(cgroup) = &self.cgroup {
                cgroup.kill();
            }
            if let Some(group) = self.group {
                let _ = kill_process_group(group, Signal::KILL);
            }
            left.iter().for_each(|relative| descendants::send(relative, Signal::KILL));
            let found = self.members();
            let gone =
                found.as_ref().is_ok_and(Vec::is_empty) && self.cgroup.as_ref().is_none_or(Cgroup::is_empty);
            if gone || SystemClock.now() >= give_up {
                return gone;
            }
            left = found.unwrap_or_default();
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Waits until it is time to act, and returns which processes are known by then. `None`: all is done.
fn stand_by(watched: &mut WatchedCommand, messages: &mut MessageReader) -> Option<Vec<ProcessEntry>> {
    let mut act = BootInstant::NEVER;
    let mut make_cgroup = BootInstant::NEVER;
    let mut known: Option<Vec<ProcessEntry>> = None;
    loop {
        let ahead = if known.is_none() { act.before(AHEAD) } else { act };
        let message = match messages.next_before(ahead.min(make_cgroup)) {
            NextMessage::Line(line) => line,
            // `run` has closed the pipe without its last message: it is dead, so act now.
            NextMessage::Closed => return Some(known.unwrap_or_default()),
            NextMessage::Late => {
                let now = SystemClock.now();
                if now >= act {
                    return Some(known.unwrap_or_default());
                } else if now >= make_cgroup {
                    make_cgroup = BootInstant::NEVER;
                    watched.make_cgroup();
                } else {
                    known = Some(watched.members().unwrap_or_default());
                }
                continue;
            }
        };
        match message.split_once(' ') {
            None if message == GOOD_BYE => return None,
            Some(("act", nanos)) => {
                act = nanos.parse().map_or(act, BootInstant::from_nanos);
                known = None;
            }
            Some(("lock", lock)) => {
                let (fence, name) = lock.split_once(' ').unwrap_or((lock, ""));
                watched.marks = vec![format!("LOCKKEEPER_NAME={name}"), format!("LOCKKEEPER_FENCE={fence}")];
                watched.tag = cgroup::tag(watched.run, fence);
            }
            Some(("dir", dir)) => watched.private_dir = Some(dir.into()),
            Some(("mark", variable)) => watched.marks = vec![variable.to_owned()],
            Some(("group", pid)) => {
                watched.group = pid.parse().ok().and_then(Pid::from_raw);
                make_cgroup = SystemClock.now() + CGROUP_AFTER;
            }
            _ => {}
        }
    }
}

/// The lines that `run` sends.
struct MessageReader {
    bytes: Vec<u8>,
    /// It goes on during suspend.
    timer: OwnedFd,
}

/// The next message of `run`, or why there is none.
enum NextMessage {
    Line(String),
    /// There was none until then.
    Late,
    /// The other end is closed, and there will be no more.
    Closed,
}

impl MessageReader {
    fn new() -> io::Result<MessageReader> {
        let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?;
        Ok(MessageReader { bytes: Vec::new(), timer })
    }

    /// Waits for the next message until `end`. Nothing but the end of file says that `run` is dead: a machine without memory or
    /// descriptors must not cost a command that has its lock.
    fn next_before(&mut self, end: BootInstant) -> NextMessage {
        self.set_timer(end);
        loop {
            if let Some(at) = self.bytes.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.bytes.drain(..=at).collect();
                return NextMessage::Line(String::from_utf8_lossy(&line[..at]).into_owned());
            }
            let input = rustix::stdio::stdin();
            let mut fds = [PollFd::new(&input, PollFlags::IN), PollFd::new(&self.timer, PollFlags::IN)];
            if poll(&mut fds, None).is_err() {
                if SystemClock.now() >= end {
                    return NextMessage::Late;
                }
                std::thread::sleep(POLL_AGAIN);
                continue;
            }
            if fds[0].revents().is_empty() {
                return NextMessage::Late;
            }
            let mut bytes = [0; 512];
            match rustix::io::read(input, &mut bytes) {
                Ok(0) => return NextMessage::Closed,
                Ok(n) => self.bytes.extend_from_slice(&bytes[..n]),
                Err(_) => std::thread::sleep(POLL_AGAIN),
            }
        }
    }

    /// Sets the timer to `end`, or stops it if that never comes.
    fn set_timer(&self, end: BootInstant) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let at = if end < BootInstant::NEVER.before(Duration::from_secs(1 << 32)) {
            let left = end.since(SystemClock.now()).max(Duration::from_nanos(1));
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        } else {
            zero
        };
        // Fails only for a descriptor that is no timer, or a time that is none.
        let _ = timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval: zero, it_value: at },
        );
    }
}
