//! How far the clocks of this process are ahead of the machine's: more than nothing only in a time namespace of its own.

use std::io;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::process::is_absent;

/// The offset of one clock. A value that cannot be read, because no file descriptor is left for example, is read again the
/// next time.
pub(crate) struct ClockOffset {
    /// The names that the kernel writes for the clock.
    names: [&'static str; 2],
    nanos: AtomicI64,
}

pub(crate) static BOOTTIME: ClockOffset = ClockOffset::new(["boottime", "7"]);
static MONOTONIC: ClockOffset = ClockOffset::new(["monotonic", "1"]);

const UNREAD: i64 = i64::MIN;

impl ClockOffset {
    const fn new(names: [&'static str; 2]) -> Self {
        ClockOffset { names, nanos: AtomicI64::new(UNREAD) }
    }

    /// In nanoseconds; zero while it cannot be read.
    pub fn get(&self) -> i64 {
        self.get_or_read(read_table)
    }

    fn get_or_read(&self, read: impl FnOnce() -> io::Result<String>) -> i64 {
        match self.nanos.load(Ordering::Relaxed) {
            UNREAD => read().map_or(0, |table| self.set_from(&table)),
            nanos => nanos,
        }
    }

    fn set_from(&self, table: &str) -> i64 {
        let nanos = table.lines().find_map(|line| self.parse(line)).unwrap_or(0);
        self.nanos.store(nanos, Ordering::Relaxed);
        nanos
    }

    fn parse(&self, line: &str) -> Option<i64> {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        if !self.names.contains(&name) {
            return None;
        }
        let seconds: i64 = words.next()?.parse().ok()?;
        let nanos: i64 = words.next()?.parse().ok()?;
        Some(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

/// Reads the offsets of this process. A store reads them when it is opened, while a failure can still be an error.
///
/// # Errors
/// The table of the kernel cannot be read, for example because no file descriptor is left.
pub fn read_clock_offsets() -> io::Result<()> {
    let table = read_table()?;
    for clock in [&BOOTTIME, &MONOTONIC] {
        clock.set_from(&table);
    }
    Ok(())
}

/// How long the machine has been awake: the same for all processes of the machine. CLOCK_MONOTONIC stands still during a
/// suspend, so no process looks stopped after one.
#[must_use]
pub fn awake_time() -> Duration {
    let t = clock_gettime(ClockId::Monotonic);
    Duration::from_nanos(u64::try_from(t.tv_sec * 1_000_000_000 + t.tv_nsec - MONOTONIC.get()).unwrap_or(0))
}

/// An empty table if the kernel has no time namespaces.
fn read_table() -> io::Result<String> {
    match std::fs::read_to_string("/proc/self/timens_offsets") {
        Err(error) if is_absent(&error) => Ok(String::new()),
        read => read,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "monotonic           10         1\nboottime        864000         5\n";

    #[test]
    fn a_time_namespace_is_read() {
        assert_eq!(ClockOffset::new(BOOTTIME.names).set_from(TABLE), 864_000_000_000_005);
        assert_eq!(ClockOffset::new(MONOTONIC.names).set_from(TABLE), 10_000_000_001);
        assert_eq!(ClockOffset::new(["7", "7"]).set_from("1 10 1\n7 2 3\n"), 2_000_000_003);
        assert_eq!(ClockOffset::new(MONOTONIC.names).set_from(""), 0);
    }

    /// The first failure was kept as an offset of zero: in a time namespace every other process took this one for stopped.
    #[test]
    fn a_table_that_cannot_be_read_now_is_read_again() {
        let clock = ClockOffset::new(MONOTONIC.names);
        assert_eq!(clock.get_or_read(|| Err(io::Error::from_raw_os_error(24))), 0);
        assert_eq!(clock.get_or_read(|| Ok(TABLE.into())), 10_000_000_001);
        assert_eq!(clock.get_or_read(|| unreachable!("it is known")), 10_000_000_001);
    }
}
