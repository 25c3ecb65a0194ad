//! The lease that a command must not outlive: that of one lock, or those of all partitions that it works on.

use std::future::pending;
use std::io;
use std::time::Duration;

use lockkeeper::{BootInstant, Clock, Fence, Guard, LockName, SystemClock};

use super::CommandProcess;
use super::watchdog::Watchdog;

/// The facts of a lease that the supervisor needs. Of several leases the earliest counts.
pub trait CommandLease {
    /// Until when the command may run, unless a renewal moves it on.
    fn deadline(&self) -> BootInstant;

    /// The time from a renewal to the deadline.
    fn ttl(&self) -> Duration;

    /// The same for the current lease: the first one may be shorter.
    fn lease(&self) -> Duration;

    /// Whether nothing is lost.
    fn is_held(&self) -> bool;

    /// Why it is lost, or will be at the deadline.
    fn loss_reason(&self) -> String;

    /// The fence that tells this command of this process apart from others, for its control group.
    fn tag(&self) -> Fence;

    /// Starts a watchdog for the command.
    fn start_watchdog(&self) -> io::Result<Watchdog>;

    /// Completes when less than `lead` is left until the deadline, or when something is lost.
    async fn nearly_lost(&self, lead: Duration);

    /// Completes when there is something to tell the command. Dropping the future loses nothing.
    async fn changed(&self) {
        pending().await
    }

    /// Tells the command what has changed. Its watchdog knows the deadline by then.
    fn tell(&self, _command: &CommandProcess) {}

    /// The time until the deadline.
    fn remaining(&self) -> Duration {
        if self.is_held() { self.deadline().since(SystemClock.now()) } else { Duration::ZERO }
    }
}

/// The lease of one lock.
pub struct LockLease<'a> {
    pub guard: &'a Guard,
    pub name: &'a LockName,
}

impl CommandLease for LockLease<'_> {
    fn deadline(&self) -> BootInstant {
        self.guard.deadline()
    }

    fn ttl(&self) -> Duration {
        self.guard.ttl()
    }

    fn lease(&self) -> Duration {
        self.guard.lease()
    }

    fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    fn loss_reason(&self) -> String {
        self.guard.loss_reason().to_string()
    }

    fn tag(&self) -> Fence {
        self.guard.fence()
    }

    fn start_watchdog(&self) -> io::Result<Watchdog> {
        Watchdog::start(self.name, self.guard.fence())
    }

    async fn nearly_lost(&self, lead: Duration) {
        self.guard.nearly_lost(lead).await;
    }
}
