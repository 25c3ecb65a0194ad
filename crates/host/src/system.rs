//! The clock of the operating system: CLOCK_BOOTTIME, with one timer thread per process.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use lockkeeper_core::{BootInstant, WallTime};
use rustix::time::{ClockId, clock_gettime};

use crate::clock::{Clock, Timer};
use crate::per_process::PerProcess;
use crate::process::is_absent;
use crate::timers::TimerThread;

/// The machine's own clock: CLOCK_BOOTTIME, which goes on while the machine is suspended.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// By how many nanoseconds this process's boot-time clock is ahead of the machine's (it runs in a time namespace
    /// of its own), zero nearly everywhere. [`Clock::now`] has it taken off already, so that processes of one machine
    /// agree on what a moment is.
    pub fn shift() -> i64 {
        match SHIFT.load(Ordering::Relaxed) {
            // A value that cannot be read now is read again the next time.
            UNREAD => read_shift().unwrap_or(0),
            shift => shift,
        }
    }

    /// The timers of this process; in the child of a fork not those of its parent, whose thread does not exist there.
    fn timers() -> io::Result<&'static Arc<TimerThread>> {
        static TIMERS: PerProcess<Arc<TimerThread>> = PerProcess::new();
        TIMERS.get_or_try_init(|| {
            // A child may be in another time namespace than its parent.
            read_shift()?;
            TimerThread::start()
        })
    }
}

const UNREAD: i64 = i64::MIN;
static SHIFT: AtomicI64 = AtomicI64::new(UNREAD);

fn read_shift() -> io::Result<i64> {
    let offsets = match std::fs::read_to_string("/proc/self/timens_offsets") {
        Err(error) if is_absent(&error) => String::new(),
        read => read?,
    };
    let shift = offsets.lines().find_map(boottime_offset).unwrap_or(0);
    SHIFT.store(shift, Ordering::Relaxed);
    Ok(shift)
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
    fn now(&self) -> BootInstant {
        let t = clock_gettime(ClockId::Boottime);
        let nanos = t.tv_sec * 1_000_000_000 + t.tv_nsec - Self::shift();
        BootInstant::from_nanos(u64::try_from(nanos).unwrap_or(0))
    }

    fn wall(&self) -> WallTime {
        let t = clock_gettime(ClockId::Realtime);
        WallTime::from_micros(u64::try_from(t.tv_sec * 1_000_000 + t.tv_nsec / 1_000).unwrap_or(0))
    }

    fn start(&self) -> io::Result<()> {
        Self::timers().map(drop)
    }

    fn call_at(&self, at: BootInstant, then: Box<dyn FnOnce() + Send>) -> Timer {
        let timers = Self::timers().unwrap_or_else(|error| panic!("{NO_TIMERS}: {error}"));
        let key = timers.add(at, then);
        Timer::new(move || timers.remove(key))
    }
}

const NO_TIMERS: &str = "no thread or no file descriptor is left for the timers of this process";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_namespace_is_read() {
        assert_eq!(boottime_offset("boottime          864000      5"), Some(864_000_000_000_005));
        assert_eq!(boottime_offset("monotonic           10         0"), None);
    }
}
