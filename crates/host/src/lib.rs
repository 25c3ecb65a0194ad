//! Everything that Lockkeeper needs from the operating system: the time, random bits, which machine and process this is, and
//! whether another process still runs; and how events are passed on inside a process; and it
//! gives a store a thread of its own for its sockets. Stores and the library share it;
//! `core` knows nothing of it.
#![deny(missing_docs)]

#[cfg(not(target_os = "linux"))]
compile_error!("Lockkeeper keeps its deadlines on CLOCK_BOOTTIME and needs Linux for it");

mod clock;
mod log;
mod per_process;
mod process;
mod stop;
mod system;
mod time_namespace;
mod timers;
mod virtual_clock;
mod vital_thread;

pub use clock::{Clock, Timer, sleep_until};
pub use log::{call_elsewhere, log_elsewhere};
pub use process::{Liveness, Process, boot_id, host_name};
pub use stop::{BusySection, stop_this_process, while_busy};
pub use system::SystemClock;
pub use time_namespace::{awake_time, read_clock_offsets};
pub use virtual_clock::VirtualClock;
pub use vital_thread::{forbid_blocking, may_block};

/// 128 bits from the operating system's random source.
///
/// # Panics
/// If the operating system has none: without them nothing here is safe.
pub fn random_128() -> [u8; 16] {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).expect("the operating system gives random bits");
    bits
}
