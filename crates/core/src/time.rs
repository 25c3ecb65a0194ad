//! Points in time: on the boot-time clock for deadlines, on the wall clock for display and fences.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point in time on the boot-time clock: nanoseconds since an origin that every process of one boot shares.
///
/// Deadlines are boot instants, never wall-clock times: a wall clock can be set, and `std::time::Instant` stops
/// while a laptop or a virtual machine is suspended, which makes a lease look younger than it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootInstant(u64);

impl BootInstant {
    /// An instant that never comes.
    pub const NEVER: BootInstant = BootInstant(u64::MAX);

    /// The instant `nanos` nanoseconds after the clock's origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        BootInstant(nanos)
    }

    /// Nanoseconds since the clock's origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this instant is; zero if it is not later.
    pub const fn since(self, earlier: BootInstant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This instant minus `by`, not below the origin.
    #[must_use]
    pub const fn before(self, by: Duration) -> BootInstant {
        BootInstant(self.0.saturating_sub(nanos(by)))
    }
}

impl std::ops::Add<Duration> for BootInstant {
    type Output = BootInstant;
    fn add(self, by: Duration) -> BootInstant {
        BootInstant(self.0.saturating_add(nanos(by)))
    }
}

const fn nanos(d: Duration) -> u64 {
    let n = d.as_nanos();
    if n > u64::MAX as u128 { u64::MAX } else { n as u64 }
}

/// Wall-clock time in microseconds since 1970: the floor of fences, and what people are shown. Never a deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WallTime(u64);

impl WallTime {
    /// The time `micros` microseconds after 1970 began.
    pub const fn from_micros(micros: u64) -> Self {
        WallTime(micros)
    }

    /// Microseconds since 1970 began.
    pub const fn as_micros(self) -> u64 {
        self.0
    }
}
