//! Ends a command with everything that it has started, and waits until nothing is left.

use std::time::Duration;

use lockkeeper::{BootInstant, Clock, Fence, SystemClock};
use lockkeeper_host::sleep_until;
use rustix::process::{Signal, getpid};
use tokio::signal::unix::Signal as Stream;

use super::CommandProcess;
use super::cgroup::{self, Cgroup};

/// A process that SIGKILL does not end in this time hangs in the kernel; this process cannot wait for it for ever.
const KILL_TIME: Duration = Duration::from_secs(2);
/// How often this process checks for the end of processes that are not its children: the kernel does not report their end.
const POLL: Duration = Duration::from_millis(20);

impl CommandProcess {
    /// Asks the command and everything that it has started to end. A stopped process does not handle TERM until it continues.
    pub fn request_end(&self) {
        self.signal_all(Signal::TERM);
        self.signal_all(Signal::CONT);
    }

    /// Waits until nothing is left, and kills the rest at `kill_at`. Returns whether nothing is left. `changes`: the stream of SIGCHLD.
    pub async fn end_before(&mut self, changes: &mut Stream, kill_at: BootInstant, fence: Fence) -> bool {
        self.gone_before(changes, kill_at).await
            || self.kill_all(changes, fence).await
            || self.leave_to_watchdog(changes).await
    }

    /// The command has ended: the watchdog may go.
    pub fn end_watchdog(&mut self, fence: Fence) {
        // A watchdog that has the order to kill removes the control group at its end: until then it needs the group.
        if !self.dismiss_watchdog() && self.leaving.is_none() {
            // Its watchdog was killed, and has left the group.
            Cgroup::find(&tag(fence)).into_iter().for_each(Cgroup::remove);
        }
    }

    async fn kill_all(&mut self, changes: &mut Stream, fence: Fence) -> bool {
        let give_up = SystemClock.now() + KILL_TIME;
        while SystemClock.now() < give_up {
            self.signal_group(Signal::KILL);
            if let Some(cgroup) = Cgroup::find(&tag(fence)) {
                cgroup.kill();
            }
            self.signal_all(Signal::KILL);
            if self.gone_before(changes, (SystemClock.now() + POLL).min(give_up)).await {
                return true;
            }
            if self.is_blind() {
                break;
            }
        }
        false
    }

    /// This process could not kill everything, or could not find out whether it has: it may have no file descriptor left to read /proc
    /// with. The watchdog kills the rest. This process waits for it, because a lock that is given back lets the next holder in.
    async fn leave_to_watchdog(&mut self, changes: &mut Stream) -> bool {
        self.order_watchdog_to_kill();
        let give_up = SystemClock.now() + KILL_TIME;
        while self.watchdog_killed_all().is_none() && SystemClock.now() < give_up {
            changed_before(changes, give_up).await;
            self.change();
        }
        self.watchdog_killed_all() == Some(true)
    }

    async fn gone_before(&mut self, changes: &mut Stream, end: BootInstant) -> bool {
        loop {
            self.change();
            if self.all_gone() {
                return true;
            }
            if SystemClock.now() >= end {
                return false;
            }
            changed_before(changes, end).await;
        }
    }
}

fn tag(fence: Fence) -> String {
    cgroup::tag(getpid(), &fence.to_string())
}

/// Waits for the end of a child until the next poll, or until `end`.
async fn changed_before(changes: &mut Stream, end: BootInstant) {
    tokio::select! {
        _ = changes.recv() => {}
        () = sleep_until(&SystemClock, (SystemClock.now() + POLL).min(end)) => {}
    }
}
