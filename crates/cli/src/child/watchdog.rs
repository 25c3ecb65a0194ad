//! A second process that ends the command when we cannot: because we were killed, or stopped past the deadline.
//!
//! The kernel kills the command itself when we die (see [`super::shim`]), but not what it had started; and nobody at
//! all acts while we are stopped. The watchdog hears from us when to act, a little before the deadline, and again whenever
//! that moves. When the moment comes, or the line to us goes dead without a good-bye, it kills the whole process group, and
//! whoever carries our mark in its environment. It is started only for commands that take a while: a short one is over
//! before it would be of use.

use std::ffi::OsString;
use std::io::{PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use lockkeeper::{Clock, Fence, LockName, Moment, SystemClock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::family;

/// The first word on its command line.
pub const WORD: &str = "__watchdog";
/// A command that has run for this long gets one.
pub const AFTER: Duration = Duration::from_millis(50);
/// So long before it acts it looks for those in other groups: that takes its time where there are many processes.
const AHEAD: Duration = Duration::from_millis(100);
/// What we send to say good-bye.
const GOOD_BYE: u64 = 0;

static OURS: AtomicI32 = AtomicI32::new(0);

/// Whether `pid` is our watchdog: it is a descendant that must outlive the others.
pub fn is_ours(pid: i32) -> bool {
    OURS.load(Ordering::Relaxed) == pid
}

/// Our end of the line.
#[derive(Debug)]
pub struct Watchdog {
    line: PipeWriter,
    told: Moment,
}

impl Watchdog {
    /// Starts one for the process group `group`. It acts at the moment that it was told last.
    pub fn start(group: Pid, name: &LockName, fence: Fence) -> Option<Self> {
        let (reader, line) = std::io::pipe().ok()?;
        let child = Command::new("/proc/self/exe")
            .arg0("lockkeeper")
            .args([WORD, &group.as_raw_pid().to_string(), name.as_str(), &fence.to_string()])
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Its own group: it must not end with the one it watches, or with ours.
            .process_group(0)
            .spawn()
            .ok()?;
        OURS.store(i32::try_from(child.id()).unwrap_or(0), Ordering::Relaxed);
        Some(Watchdog { line, told: Moment::from_nanos(GOOD_BYE) })
    }

    /// Tells it when to act, if that has moved.
    pub fn tell(&mut self, at: Moment) {
        if at != self.told {
            self.told = at;
            let _ = self.line.write_all(&at.as_nanos().to_ne_bytes());
        }
    }

    /// All is done; it may go.
    pub fn dismiss(mut self) {
        let _ = self.line.write_all(&GOOD_BYE.to_ne_bytes());
    }
}

/// The watchdog itself.
pub fn main(words: impl Iterator<Item = OsString>) -> i32 {
    let words: Vec<OsString> = words.collect();
    let word = |i: usize| words.get(i).and_then(|word| word.to_str());
    let group = word(0).and_then(|w| w.parse().ok()).and_then(Pid::from_raw);
    let (Some(group), Some(name), Some(fence)) = (group, word(1), word(2)) else {
        return lockkeeper::Outcome::Invalid.exit_code().into();
    };
    let Some(known) = stand_by(name, fence) else { return 0 };
    let _ = kill_process_group(group, Signal::KILL);
    // And whoever has come since.
    for relative in known.into_iter().chain(marked(name, fence)) {
        family::send(&relative, Signal::KILL);
    }
    0
}

/// Waits until it is time to act, and tells who is known to carry the mark then. `None`: all is done.
fn stand_by(name: &str, fence: &str) -> Option<Vec<family::Relative>> {
    let mut at = Moment::NEVER;
    loop {
        let mut news = news_before(at.before(AHEAD));
        let mut known = Vec::new();
        if let News::Nothing = news {
            known = marked(name, fence).collect();
            news = news_before(at);
        }
        match news {
            News::Told(GOOD_BYE) => return None,
            News::Told(nanos) => at = Moment::from_nanos(nanos),
            News::Nothing | News::Silence => return Some(known),
        }
    }
}

enum News {
    /// When to act.
    Told(u64),
    /// The time came first.
    Nothing,
    /// Nobody is there any more who could tell.
    Silence,
}

/// What we are told until `end`. The timer goes on during suspend.
fn news_before(end: Moment) -> News {
    try_news_before(end).unwrap_or(News::Silence)
}

fn try_news_before(end: Moment) -> Option<News> {
    let input = rustix::stdio::stdin();
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC).ok()?;
    if end < Moment::NEVER.before(Duration::from_secs(1 << 32)) {
        let left = end.since(SystemClock.now()).max(Duration::from_nanos(1));
        let at = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: at };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &once).ok()?;
    }
    let mut fds = [PollFd::new(&input, PollFlags::IN), PollFd::new(&timer, PollFlags::IN)];
    while let Err(Errno::INTR) = poll(&mut fds, None) {}
    if fds[0].revents().is_empty() {
        return Some(News::Nothing);
    }
    let mut news = [0; 8];
    match rustix::io::read(input, &mut news) {
        Ok(8) => Some(News::Told(u64::from_ne_bytes(news))),
        _ => None,
    }
}

/// Every process of ours that carries this lock in its environment, in whatever group or session it is.
fn marked(name: &str, fence: &str) -> impl Iterator<Item = family::Relative> {
    let marks = [format!("LOCKKEEPER_NAME={name}"), format!("LOCKKEEPER_FENCE={fence}")];
    let me = std::process::id() as i32;
    family::processes().filter(move |pid| *pid != me).filter_map(family::read).filter(move |relative| {
        let environ = std::fs::read(format!("/proc/{}/environ", relative.pid)).unwrap_or_default();
        let has = |mark: &String| environ.split(|b| *b == 0).any(|entry| entry == mark.as_bytes());
        marks.iter().all(has)
    })
}
