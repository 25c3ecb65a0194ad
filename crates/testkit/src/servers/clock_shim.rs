//! A library that shifts the clock of a server, loaded with LD_PRELOAD.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::{Arc, Mutex};

use lockkeeper_core::IgnorePoison;

use super::{Skip, TempDir, require};

/// A wall clock that a test moves while a server lives on it, as an operator or NTP does to a whole machine.
///
/// Only the wall clock moves: intervals that the server measures by other clocks stay true. Clones are the same clock;
/// for two servers with clocks that differ, build two.
///
/// ```no_run
/// use lockkeeper_testkit::servers::{self, ClockShim, RedisOptions};
/// let Ok(clock) = ClockShim::build() else { return };
/// let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
/// let Ok(redis) = servers::redis(options) else { return };
/// clock.jump(-3600 * ClockShim::SECOND); // an hour back, now
/// ```
#[derive(Clone, Debug)]
pub struct ClockShim(Arc<SharedOffset>);

#[derive(Debug)]
struct SharedOffset {
    dir: TempDir,
    offset: Mutex<(i64, File)>,
}

impl ClockShim {
    /// A second, in the unit of [`ClockShim::jump`].
    pub const SECOND: i64 = 1_000_000_000;

    /// Compiles the shim that a server is started with. The clock is right until the first jump.
    ///
    /// # Errors
    /// [`Skip`] if the tests are to run without `cc`.
    ///
    /// # Panics
    /// If there is no C compiler, or it fails.
    pub fn build() -> Result<ClockShim, Skip> {
        let cc = require("cc", "cc", "gcc")?;
        let dir = TempDir::new("clock");
        fs::write(dir.join("shim.c"), include_str!("clock_shim.c"))
            .expect("a new directory can be written to");
        let flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-o", "shim.so", "shim.c"];
        let output = Command::new(cc).current_dir(dir.path()).args(flags).output();
        let output = output.expect("the compiler can be run");
        assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
        let file = File::create_new(dir.join("offset")).expect("a new directory can be written to");
        let offset = Mutex::new((0, file));
        let shim = ClockShim(Arc::new(SharedOffset { dir, offset }));
        shim.jump(0);
        Ok(shim)
    }

    /// Moves the clock by so many nanoseconds, forward or back, at once. Jumps add up.
    ///
    /// # Panics
    /// If that is more than 292 years in all.
    pub fn jump(&self, nanoseconds: i64) {
        let mut offset = self.0.offset.lock().ignore_poison();
        offset.0 = offset.0.checked_add(nanoseconds).expect("a clock does not go that far");
        // One write of eight aligned bytes: no reader sees half of it.
        offset.1.write_all_at(&offset.0.to_ne_bytes(), 0).expect("the offset can be written");
    }

    /// How far it is ahead of the machine's, in nanoseconds.
    pub fn offset(&self) -> i64 {
        self.0.offset.lock().ignore_poison().0
    }

    /// The environment of a program that runs on this clock, for [`super::Launch::env`].
    pub fn env(&self) -> Vec<(OsString, OsString)> {
        let path = |name| self.0.dir.join(name).into_os_string();
        vec![("LD_PRELOAD".into(), path("shim.so")), ("LOCKKEEPER_CLOCK_OFFSET".into(), path("offset"))]
    }
}
