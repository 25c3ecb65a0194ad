//! Stopping this process (Ctrl-Z) where that harms no other: not while it has a lock that all others wait for.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{RwLock, RwLockReadGuard, TryLockError};
use std::time::{Duration, Instant};

use lockkeeper_core::IgnorePoison;
use rustix::process::{Signal, getpid, kill_process};

static BUSY: RwLock<()> = RwLock::new(());
/// A stop is under way: nothing new is begun.
static STOPPING: AtomicBool = AtomicBool::new(false);

/// How long a stop is put off. A transaction on a disk that hangs must not make Ctrl-Z useless.
const LONGEST: Duration = Duration::from_secs(2);
/// How often a thread looks whether it may go on.
const LOOK: Duration = Duration::from_micros(50);

thread_local! {
    /// How many sections this thread is in.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// This process has something that others wait for, until this is dropped.
#[derive(Debug)]
pub struct BusySection {
    _turn: RwLockReadGuard<'static, ()>,
}

impl Drop for BusySection {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Puts off [`stop_this_process`] until the answer is dropped: inside a transaction, for example, whose write lock every
/// other process waits for. While a stop is under way this waits for its end, unless this thread is in a section already: the stop
/// waits for that one.
pub fn while_busy() -> BusySection {
    while DEPTH.get() == 0 && STOPPING.load(Ordering::SeqCst) {
        std::thread::sleep(LOOK);
    }
    DEPTH.set(DEPTH.get() + 1);
    BusySection { _turn: BUSY.read().ignore_poison() }
}

/// Stops this process as SIGSTOP does, as soon as no thread of it is busy. Returns when it goes on.
pub fn stop_this_process() {
    let began = Instant::now();
    STOPPING.store(true, Ordering::SeqCst);
    let quiet = loop {
        match BUSY.try_write() {
            Ok(quiet) => break Some(quiet),
            Err(TryLockError::Poisoned(quiet)) => break Some(quiet.into_inner()),
            Err(TryLockError::WouldBlock) if began.elapsed() > LONGEST => break None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
        }
    };
    let _ = kill_process(getpid(), Signal::STOP);
    // Another thread may be the one that takes the signal, and that thread may have to wait for a processor. From the moment it has
    // taken the signal the kernel lets no thread of the process return to its code, so this one stops at the end of the read.
    while stop_is_pending() {
        std::thread::sleep(LOOK);
    }
    drop(quiet);
    STOPPING.store(false, Ordering::SeqCst);
}

/// Whether a SIGSTOP to this process waits for a thread to take it.
fn stop_is_pending() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let pending = pending.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    pending.is_some_and(|bits| bits & (1 << (Signal::STOP.as_raw() - 1)) != 0)
}
