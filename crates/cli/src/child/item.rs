//! One command of several that run at the same time, each for an item of work with a lease of its own.
//!
//! As with a lock, a command must not outlive its lease: it gets TERM some time before the deadline, then KILL; a watchdog kills it if
//! this process is stopped or killed.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use lockkeeper::{BootInstant, Clock, Error, LockName, SystemClock};
use lockkeeper_host::sleep_until;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, waitpid};
use tokio::process::Child;
use tokio::sync::watch;

use super::registry;
use super::shim;
use super::supervisor::LeadTimes;
use super::watchdog::Watchdog;
use crate::exit;
use crate::work::OwnItem;

/// A process that SIGKILL does not end in this time hangs in the kernel.
const GIVE_UP: Duration = Duration::from_secs(2);

/// A command, and how to run it for each item.
pub struct ItemCommand<'a> {
    pub command: &'a [OsString],
    /// Time between TERM and KILL.
    pub grace: Duration,
    /// The variables of its environment that are the same for every item. `None`: removed.
    pub env: Vec<(&'static str, Option<String>)>,
    pub json: bool,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemEnd {
    /// By itself, or by a signal: 128 + n.
    Itself(i32),
    /// It was ended because its lease was lost or about to be.
    LeaseLost,
}

/// A running command with its watchdog.
struct ItemProcess {
    child: Child,
    group: Pid,
    watchdog: Watchdog,
}

impl ItemCommand<'_> {
    /// Runs the command for an item until it ends, and extends the lease meanwhile. `signals` has the signals that are passed on.
    pub async fn run(
        &self,
        item: &OwnItem,
        name: &LockName,
        signals: &mut watch::Receiver<Option<Signal>>,
    ) -> io::Result<ItemEnd> {
        let mut process = self.start(item, name).await?;
        let end = process.until_end(self, item, signals).await;
        process.end_watchdog(matches!(end, Ok(ItemEnd::Itself(_)))).await;
        end
    }

    async fn start(&self, item: &OwnItem, name: &LockName) -> io::Result<ItemProcess> {
        let mut watchdog = Watchdog::start_for_one(name, item.fence())?;
        let leads = LeadTimes::new(self.grace, item.lease(), None);
        watchdog.send_deadline(item.deadline().await.before(leads.watchdog));
        let mut command = shim::command(self.command, self.json);
        let own = [
            ("LOCKKEEPER_NAME", name.to_string()),
            ("LOCKKEEPER_FENCE", item.fence().to_string()),
            ("LOCKKEEPER_ATTEMPT", item.attempt_number().to_string()),
            ("LOCKKEEPER_TTL_MS", item.lease().as_millis().to_string()),
            (item.variable(), item.id().to_owned()),
        ];
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(own).process_group(0).stdin(Stdio::null());
        let child = tokio::process::Command::from(command).spawn()?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let group = group.expect("a child that was just started has a pid");
        watchdog.send_group(group);
        Ok(ItemProcess { child, group, watchdog })
    }
}

impl ItemProcess {
    async fn until_end(
        &mut self,
        command: &ItemCommand<'_>,
        item: &OwnItem,
        signals: &mut watch::Receiver<Option<Signal>>,
    ) -> io::Result<ItemEnd> {
        let mut extend_at = SystemClock.now() + item.lease() / 4;
        loop {
            let (deadline, leads) =
                (item.deadline().await, LeadTimes::new(command.grace, item.lease(), None));
            self.watchdog.send_deadline(deadline.before(leads.watchdog));
            let extension = async {
                sleep_until(&SystemClock, extend_at).await;
                item.extend().await
            };
            tokio::select! {
                biased;
                ended = self.child.wait() => {
                    let code = code_of(ended?);
                    // A result counts, however late: the record decides whether it counts. A failure that comes too late may
                    // be the work of the watchdog.
                    let in_time = SystemClock.now() < item.deadline().await;
                    return Ok(if code == 0 || in_time { ItemEnd::Itself(code) } else { ItemEnd::LeaseLost });
                }
                () = sleep_until(&SystemClock, deadline.before(leads.term)) => {
                    return self.end(deadline.before(leads.kill), command.grace).await;
                }
                Ok(()) = signals.changed() => {
                    if let Some(signal) = *signals.borrow_and_update() {
                        let _ = kill_process_group(self.group, signal);
                    }
                }
                extended = extension => match extended {
                    Ok(()) => extend_at = SystemClock.now() + item.lease() / 4,
                    Err(Error::Lost(_) | Error::Stale { .. }) => {
                        return self.end(deadline.before(leads.kill), command.grace).await;
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a lease could not be extended; trying again");
                        extend_at = SystemClock.now() + item.lease() / 24;
                    }
                },
            }
        }
    }

    /// Ends the command because its lease is lost: TERM, and KILL after the grace or at `kill_at`.
    async fn end(&mut self, kill_at: BootInstant, grace: Duration) -> io::Result<ItemEnd> {
        let now = SystemClock.now();
        let kill_at = kill_at.min(now + grace);
        if kill_at > now {
            let _ = kill_process_group(self.group, Signal::TERM);
            // A stopped process does not handle TERM until it continues.
            let _ = kill_process_group(self.group, Signal::CONT);
            tokio::select! {
                _ = self.child.wait() => {}
                () = sleep_until(&SystemClock, kill_at) => {}
            }
        }
        // Also what the command has left behind in its group.
        let _ = kill_process_group(self.group, Signal::KILL);
        let _ = tokio::time::timeout(GIVE_UP, self.child.wait()).await;
        Ok(ItemEnd::LeaseLost)
    }

    /// Ends the watchdog, and waits for that, so that none is left as a zombie. A watchdog whose pipe is closed without a last
    /// message kills what the command has started, also what has left its process group.
    async fn end_watchdog(self, all_is_done: bool) {
        let pid = self.watchdog.pid();
        registry::remove(pid);
        match all_is_done {
            true => self.watchdog.dismiss(),
            false => drop(self.watchdog),
        }
        let give_up = SystemClock.now() + GIVE_UP;
        while matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None)) && SystemClock.now() < give_up {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn code_of(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(exit::by_signal)).unwrap_or(-1)
}
