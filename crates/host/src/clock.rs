//! The clock and its timers, as traits: everything that waits, waits on a [`Clock`].

use std::fmt::Debug;
use std::io;

use lockkeeper_core::{BootInstant, WallTime};
use tokio::sync::oneshot;

/// Where time comes from. Everything that waits, waits here, so that a test can turn the hands.
pub trait Clock: Send + Sync + Debug {
    /// Now, on the boot-time clock.
    fn now(&self) -> BootInstant;

    /// Now, on the wall clock.
    fn wall(&self) -> WallTime;

    /// Makes what [`Clock::call_at`] needs, if it is not there: a thread and file descriptors. Call it before anything depends on a
    /// deadline, when a caller can still receive the error.
    ///
    /// # Errors
    /// If the operating system gives no thread or no file descriptor.
    fn start(&self) -> io::Result<()>;

    /// Calls `then` once, at `at` or soon after, on a thread of the clock's. It must not block. Dropping the timer
    /// before then cancels the call.
    ///
    /// # Panics
    /// If [`Clock::start`] was not called in this process, and would return an error now.
    fn call_at(&self, at: BootInstant, then: Box<dyn FnOnce() + Send>) -> Timer;
}

/// A call that is to come. Dropping it cancels the call.
#[must_use = "dropping a timer cancels it"]
pub struct Timer(Option<Box<dyn FnOnce() + Send>>);

impl Timer {
    /// A timer that is cancelled by calling `cancel`.
    pub fn new(cancel: impl FnOnce() + Send + 'static) -> Self {
        Timer(Some(Box::new(cancel)))
    }
}

impl Debug for Timer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Timer")
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}

/// Waits until `at`. It needs no runtime and no timer but the clock's own.
pub async fn sleep_until(clock: &dyn Clock, at: BootInstant) {
    if at == BootInstant::NEVER {
        return std::future::pending().await;
    }
    if clock.now() >= at {
        return;
    }
    let (notify, notified) = oneshot::channel();
    let _timer = clock.call_at(at, Box::new(move || _ = notify.send(())));
    let _ = notified.await;
}
