use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use lockkeeper_core::{Moment, Wall};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};

use crate::clock::{Clock, Timer};

/// The machine's own clock: CLOCK_BOOTTIME, which goes on while the machine is suspended.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// By how many nanoseconds this process's boot-time clock is ahead of the machine's (it runs in a time namespace
    /// of its own), zero nearly everywhere. [`Clock::now`] has it taken off already, so that processes of one machine
    /// agree on what a moment is.
    pub fn shift() -> i64 {
        static SHIFT: OnceLock<i64> = OnceLock::new();
        *SHIFT.get_or_init(|| {
            let offsets = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
            offsets.lines().find_map(boottime_offset).unwrap_or(0)
        })
    }
}

fn boottime_offset(line: &str) -> Option<i64> {
    let mut words = line.split_whitespace();
    if !matches!(words.next(), Some("boottime" | "7")) {
        return None;
    }
    let seconds: i64 = words.next()?.parse().ok()?;
    let nanos: i64 = words.next()?.parse().ok()?;
    Some(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        let t = clock_gettime(ClockId::Boottime);
        let nanos = t.tv_sec * 1_000_000_000 + t.tv_nsec - Self::shift();
        Moment::from_nanos(u64::try_from(nanos).unwrap_or(0))
    }

    fn wall(&self) -> Wall {
        let t = clock_gettime(ClockId::Realtime);
        Wall::from_micros(u64::try_from(t.tv_sec * 1_000_000 + t.tv_nsec / 1_000).unwrap_or(0))
    }

    fn call_at(&self, at: Moment, then: Box<dyn FnOnce() + Send>) -> Timer {
        static ALARM: OnceLock<Arc<Alarm>> = OnceLock::new();
        let alarm = ALARM.get_or_init(Alarm::start);
        let key = alarm.add(at, then);
        let alarm = alarm.clone();
        Timer::new(move || alarm.remove(key))
    }
}

type Calls = BTreeMap<(Moment, u64), Box<dyn FnOnce() + Send>>;

/// One thread for all timers of the process. It sleeps on a CLOCK_BOOTTIME timer, so that a deadline that passed
/// while the machine was suspended is told right after it wakes.
struct Alarm {
    calls: Mutex<(Calls, u64)>,
    nudge: OwnedFd,
}

impl Alarm {
    fn start() -> Arc<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let nudge = eventfd(0, flags).expect("an eventfd can be made");
        let alarm = Arc::new(Alarm { calls: Mutex::default(), nudge });
        let thread = alarm.clone();
        std::thread::Builder::new()
            .name("lockkeeper-clock".into())
            .stack_size(256 << 10)
            .spawn(move || thread.run())
            .expect("a thread can be started");
        alarm
    }

    fn add(&self, at: Moment, then: Box<dyn FnOnce() + Send>) -> (Moment, u64) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.1 += 1;
        let key = (at, calls.1);
        let first = calls.0.first_key_value().is_none_or(|(earliest, _)| key < *earliest);
        calls.0.insert(key, then);
        drop(calls);
        if first {
            let _ = rustix::io::write(&self.nudge, &1_u64.to_ne_bytes());
        }
        key
    }

    fn remove(&self, key: (Moment, u64)) {
        let removed = self.calls.lock().unwrap_or_else(PoisonError::into_inner).0.remove(&key);
        // A call may own a timer of its own: it is dropped after the lock is let go.
        drop(removed);
    }

    fn run(&self) {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Boottime, flags).expect("a timerfd can be made");
        loop {
            let (due, next) = self.due();
            for call in due {
                // One caller's panic must not stop everybody's clock.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
            }
            let Some(next) = next else { continue };
            let left = next.map_or(0, |at| at.since(SystemClock.now()).as_nanos().max(1));
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            let value = Timespec {
                tv_sec: i64::try_from(left / 1_000_000_000).unwrap_or(i64::MAX >> 1),
                tv_nsec: (left % 1_000_000_000) as i64,
            };
            let setting = Itimerspec { it_interval: zero, it_value: value };
            let _ = timerfd_settime(&timer, TimerfdTimerFlags::empty(), &setting);
            let mut fds = [PollFd::new(&timer, PollFlags::IN), PollFd::new(&self.nudge, PollFlags::IN)];
            let _ = poll(&mut fds, None);
            let _ = rustix::io::read(&self.nudge, &mut [0_u8; 8]);
        }
    }

    /// What is due now; and, if nothing is, when something will be.
    #[allow(clippy::type_complexity, reason = "read once, right above")]
    fn due(&self) -> (Vec<Box<dyn FnOnce() + Send>>, Option<Option<Moment>>) {
        let now = SystemClock.now();
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let later = calls.0.split_off(&(now + std::time::Duration::from_nanos(1), 0));
        let due: Vec<_> = std::mem::replace(&mut calls.0, later).into_values().collect();
        let next = due.is_empty().then(|| calls.0.first_key_value().map(|((at, _), _)| *at));
        (due, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn calls_come_in_order_and_cancelled_ones_never() {
        let (tell, told) = mpsc::channel();
        let now = SystemClock.now();
        let call = |ms: u64, what: &'static str| {
            let tell = tell.clone();
            SystemClock.call_at(now + Duration::from_millis(ms), Box::new(move || tell.send(what).unwrap()))
        };
        let _late = call(40, "late");
        let cancelled = call(20, "cancelled");
        let _early = call(10, "early");
        drop(cancelled);
        assert_eq!([told.recv().unwrap(), told.recv().unwrap()], ["early", "late"]);
        assert!(SystemClock.now() >= now + Duration::from_millis(40));
    }

    #[test]
    fn a_time_namespace_is_read() {
        assert_eq!(boottime_offset("boottime          864000      5"), Some(864_000_000_000_005));
        assert_eq!(boottime_offset("monotonic           10         0"), None);
    }
}
