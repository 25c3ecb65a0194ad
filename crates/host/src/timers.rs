//! The thread that makes the timed calls of a process. It sleeps on a CLOCK_BOOTTIME timer, so that a deadline that passed while the
//! machine was suspended is reported right after it wakes.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::{BootInstant, IgnorePoison};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::clock::Clock;
use crate::system::SystemClock;

/// The longest sleep while a call is pending. The timer and the eventfd end it earlier; this is for a process that has closed or replaced
/// their descriptors, as programs do that close everything when they become a daemon.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The sleep when the kernel refuses to wait.
const PAUSE: Duration = Duration::from_millis(10);

type Call = Box<dyn FnOnce() + Send>;
pub(crate) type Key = (BootInstant, u64);

/// One thread for all timers of the process, and all that it needs to run: nothing is made later.
#[derive(Debug)]
pub(crate) struct TimerThread {
    pid: u32,
    pending: Mutex<Pending>,
    /// Ends the sleep of a thread that has no call pending.
    added: Condvar,
    /// Ends the sleep of a thread that has calls pending.
    nudge: OwnedFd,
    timer: OwnedFd,
}

#[derive(Default)]
struct Pending {
    calls: BTreeMap<Key, Call>,
    count: u64,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pending", self.calls.len())
    }
}

impl TimerThread {
    /// Makes the descriptors and starts the thread.
    pub fn start() -> io::Result<Arc<Self>> {
        let timers = Arc::new(TimerThread {
            pid: std::process::id(),
            pending: Mutex::default(),
            added: Condvar::new(),
            nudge: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            timer: timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?,
        });
        let thread = timers.clone();
        let run = move || {
            loop {
                // The thread must not end: without it nothing is renewed and no deadline is reported. A panic costs one turn.
                let turn = catch_unwind(AssertUnwindSafe(|| thread.turn()));
                turn.unwrap_or_else(std::mem::forget);
            }
        };
        std::thread::Builder::new().name("lockkeeper-clock".into()).stack_size(256 << 10).spawn(run)?;
        Ok(timers)
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().ignore_poison()
    }

    pub fn add(&self, at: BootInstant, call: Call) -> Key {
        let mut pending = self.pending();
        pending.count += 1;
        let key = (at, pending.count);
        let first = pending.calls.first_key_value().is_none_or(|(earliest, _)| key < *earliest);
        pending.calls.insert(key, call);
        drop(pending);
        if first {
            self.added.notify_one();
            let _ = rustix::io::write(&self.nudge, &1_u64.to_ne_bytes());
        }
        key
    }

    pub fn remove(&self, key: Key) {
        // In the child of a fork this thread does not exist, and the lock may never be let go.
        if self.pid != std::process::id() {
            return;
        }
        let removed = self.pending().calls.remove(&key);
        // A call may own a timer of its own: it is dropped after the lock is let go.
        drop(removed);
    }

    /// Makes the calls that are due; or sleeps until the first one is, or another comes before it.
    fn turn(&self) {
        let mut pending = self.pending();
        while pending.calls.is_empty() {
            pending = self.added.wait(pending).ignore_poison();
        }
        let now = SystemClock.now();
        let later = pending.calls.split_off(&(now + Duration::from_nanos(1), 0));
        let due = std::mem::replace(&mut pending.calls, later);
        let next = pending.calls.first_key_value().map(|((at, _), _)| *at);
        drop(pending);
        if let (true, Some(next)) = (due.is_empty(), next) {
            return self.sleep(next.since(now));
        }
        for call in due.into_values() {
            // One caller's panic must not cost another its call.
            catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(std::mem::forget);
        }
    }

    fn sleep(&self, left: Duration) {
        let wait = || -> rustix::io::Result<bool> {
            let value = timespec(left.max(Duration::from_nanos(1)));
            let setting = Itimerspec { it_interval: timespec(Duration::ZERO), it_value: value };
            timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)?;
            let mut fds = [PollFd::new(&self.timer, PollFlags::IN), PollFd::new(&self.nudge, PollFlags::IN)];
            poll(&mut fds, Some(&timespec(LONGEST_SLEEP)))?;
            let _ = rustix::io::read(&self.nudge, &mut [0_u8; 8]);
            Ok(fds.iter().all(|fd| !fd.revents().contains(PollFlags::NVAL)))
        };
        if !matches!(wait(), Ok(true) | Err(rustix::io::Errno::INTR)) {
            std::thread::sleep(PAUSE.min(left));
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX >> 1),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn calls_come_in_order_and_cancelled_ones_never() {
        let (notify, notified) = mpsc::channel();
        let now = SystemClock.now();
        let call = |ms: u64, what: &'static str| {
            let notify = notify.clone();
            SystemClock.call_at(now + Duration::from_millis(ms), Box::new(move || notify.send(what).unwrap()))
        };
        let _late = call(40, "late");
        let cancelled = call(20, "cancelled");
        let _early = call(10, "early");
        drop(cancelled);
        assert_eq!([notified.recv().unwrap(), notified.recv().unwrap()], ["early", "late"]);
        assert!(SystemClock.now() >= now + Duration::from_millis(40));
    }

    #[test]
    fn a_panic_costs_nobody_else_a_call_and_the_thread_goes_on() {
        let (notify, notified) = mpsc::channel();
        let at = SystemClock.now() + Duration::from_millis(5);
        let _bad = SystemClock.call_at(at, Box::new(|| panic!("planted")));
        let first = notify.clone();
        let _good = SystemClock.call_at(at, Box::new(move || first.send("same turn").unwrap()));
        assert_eq!(notified.recv().unwrap(), "same turn");
        let _later = SystemClock.call_at(at, Box::new(move || notify.send("next turn").unwrap()));
        assert_eq!(notified.recv().unwrap(), "next turn");
    }

    // A program that becomes a daemon closes everything, and another file gets the number of our timer.
    #[test]
    fn calls_are_made_without_the_descriptors() {
        let null = || -> OwnedFd { std::fs::File::open("/dev/null").unwrap().into() };
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        for (timer, nudge) in [(null(), null()), (reader, null())] {
            let timers = Arc::new(TimerThread {
                pid: std::process::id(),
                pending: Mutex::default(),
                added: Condvar::new(),
                nudge,
                timer,
            });
            let (notify, notified) = mpsc::channel();
            let now = SystemClock.now();
            let at = now + Duration::from_millis(20);
            timers.add(at, Box::new(move || notify.send(SystemClock.now()).unwrap()));
            let thread = timers.clone();
            std::thread::spawn(move || {
                while !thread.pending().calls.is_empty() {
                    thread.turn();
                }
            });
            assert!(notified.recv().unwrap() >= at);
        }
    }
}
