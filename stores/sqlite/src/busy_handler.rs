//! The busy handler: waits for the write lock of the file, for which SQLite has no queue.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::config::NO_PROGRESS_LIMIT;
use crate::db_path::beside;

/// How long a process waits while other processes do write.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// How often a caller's thread looks for the write lock again. Another process keeps it for some microseconds.
const IMPATIENT_ROUNDS: i32 = 16;

/// Sleeps longer with each retry, with jitter, and stops after [`NO_PROGRESS_LIMIT`] without a write by any process, or
/// after [`WAIT_LIMIT`].
///
/// The sleep is a part of the time waited so far: two processes retry within microseconds, and two hundred leave the CPU to
/// the one that has the lock.
pub(crate) fn busy_handler(database: &Path) -> impl FnMut(i32) -> bool + Send + 'static {
    patient_handler(database)
}

/// The same, but it gives up at once while `impatient` is set: on the thread of a caller, which has other work.
pub(crate) fn busy_handler_unless(
    database: &Path,
    impatient: Arc<AtomicBool>,
) -> impl FnMut(i32) -> bool + Send + 'static {
    let mut wait = patient_handler(database);
    move |round| match impatient.load(Ordering::Relaxed) {
        true => {
            std::thread::yield_now();
            round < IMPATIENT_ROUNDS
        }
        false => wait(round),
    }
}

fn patient_handler(database: &Path) -> impl FnMut(i32) -> bool + Send + 'static {
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
        if now - moved.0 > NO_PROGRESS_LIMIT / 5 {
            let written = std::fs::metadata(&log).and_then(|meta| meta.modified()).ok();
            if written.is_some() && written != moved.1 {
                moved = (now, written);
            }
        }
        if now - moved.0 > NO_PROGRESS_LIMIT || now - began > WAIT_LIMIT {
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
