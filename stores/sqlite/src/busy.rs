//! Waiting for the write lock, which SQLite does not queue for.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use crate::place::beside;

/// How long nothing may be written by anybody before we give up.
pub(crate) const STANDSTILL: Duration = Duration::from_secs(5);
/// How long we wait while others do get their turn.
const CROWD: Duration = Duration::from_secs(30);

/// Waits a little longer each time, with jitter, so that those who wait do not come back all at once; then gives up.
///
/// The longer somebody waits already, the longer it sleeps: two that meet look again within microseconds, and two
/// hundred do not keep the one that has the lock from running.
pub(crate) fn patience(database: &Path) -> impl FnMut(i32) -> bool + Send + 'static {
    let log = beside(database, "-wal");
    let mut dice = u64::from_ne_bytes(lockkeeper_host::random_128()[..8].try_into().expect("8 of 16")) | 1;
    let mut began = Instant::now();
    let mut moved = (began, None::<SystemTime>);
    move |round| {
        let now = Instant::now();
        if round == 0 {
            began = now;
            moved = (now, None);
        }
        if now - moved.0 > STANDSTILL / 5 {
            let written = std::fs::metadata(&log).and_then(|meta| meta.modified()).ok();
            if written.is_some() && written != moved.1 {
                moved = (now, written);
            }
        }
        if now - moved.0 > STANDSTILL || now - began > CROWD {
            return false;
        }
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        let most = (now - began) / 4;
        let most = most.clamp(Duration::from_micros(100), Duration::from_millis(100));
        std::thread::sleep(most / 2 + most / 2 * (dice % 1024) as u32 / 1024);
        true
    }
}
