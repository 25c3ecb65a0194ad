//! The clock of the operating system: CLOCK_BOOTTIME, with one timer thread per process.

use std::io;
use std::sync::Arc;

use lockkeeper_core::{BootInstant, WallTime};
use rustix::time::{ClockId, clock_gettime};

use crate::clock::{Clock, Timer};
use crate::per_process::PerProcess;
use crate::time_namespace;
use crate::timers::TimerThread;

/// The machine's own clock: CLOCK_BOOTTIME, which goes on while the machine is suspended.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// By how many nanoseconds this process's boot-time clock is ahead of the machine's (it runs in a time namespace
    /// of its own), zero nearly everywhere. [`Clock::now`] has it taken off already, so that processes of one machine
    /// agree on what a moment is.
    pub fn shift() -> i64 {
        time_namespace::BOOTTIME.get()
    }

    /// The timers of this process; in the child of a fork not those of its parent, whose thread does not exist there.
    fn timers() -> io::Result<&'static Arc<TimerThread>> {
        static TIMERS: PerProcess<Arc<TimerThread>> = PerProcess::new();
        TIMERS.get_or_try_init(|| {
            // A child may be in another time namespace than its parent.
            time_namespace::read_clock_offsets()?;
            TimerThread::start()
        })
    }
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
