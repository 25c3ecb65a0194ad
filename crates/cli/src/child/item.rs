//! One command of several that run at the same time, each for an item of work with a lease of its own.
//!
//! As with a lock, a command must not outlive its lease: it gets TERM some time before the deadline, then KILL; a watchdog kills it if
//! this process is stopped or killed.

use std::ffi::OsString;
use std::io;
use std::time::Duration;

use lockkeeper::{BootInstant, Clock, Error, LockName, SystemClock};
use lockkeeper_host::sleep_until;
use rustix::process::Signal;
use tokio::signal::unix::Signal as Stream;
use tokio::sync::watch;

use super::supervisor::{self, LeadTimes};
use super::watchdog::Watchdog;
use super::{CommandProcess, ProcessChange};
use crate::work::OwnItem;

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
    /// It was not started, because its lease was over or about to be.
    NotStarted,
}

/// A running command under the lease of its item.
struct ItemProcess<'a> {
    child: CommandProcess,
    changes: Stream,
    item: &'a OwnItem,
    name: &'a LockName,
    grace: Duration,
    leads: LeadTimes,
}

impl ItemCommand<'_> {
    /// Runs the command for an item until it ends, and extends the lease meanwhile. `signals` has the signals that are passed on.
    pub async fn run(
        &self,
        item: &OwnItem,
        name: &LockName,
        signals: &mut watch::Receiver<Option<Signal>>,
    ) -> io::Result<ItemEnd> {
        let deadline = item.deadline().await;
        let leads = LeadTimes::new(self.grace, item.lease(), None);
        // The item may have waited for its turn while the store was unreachable.
        if SystemClock.now() >= deadline.before(leads.term) {
            return Ok(ItemEnd::NotStarted);
        }
        let mut process = self.start(item, name, deadline, leads)?;
        let end = process.until_end(deadline, signals).await;
        process.child.end_watchdog(item.fence());
        Ok(end)
    }

    fn start<'i>(
        &self,
        item: &'i OwnItem,
        name: &'i LockName,
        deadline: BootInstant,
        leads: LeadTimes,
    ) -> io::Result<ItemProcess<'i>> {
        let changes = supervisor::changes()?;
        let mut watchdog = Watchdog::start(name, item.fence())?;
        watchdog.send_deadline(deadline.before(leads.watchdog));
        let own = [
            ("LOCKKEEPER_NAME", name.to_string()),
            ("LOCKKEEPER_FENCE", item.fence().to_string()),
            ("LOCKKEEPER_ATTEMPT", item.attempt_number().to_string()),
            ("LOCKKEEPER_TTL_MS", item.lease().as_millis().to_string()),
            (item.variable(), item.id().to_owned()),
        ];
        let mut env = self.env.clone();
        env.extend(own.map(|(name, value)| (name, Some(value))));
        let child = CommandProcess::start(self.command, &env, None, watchdog, self.json)?;
        Ok(ItemProcess { child, changes, item, name, grace: self.grace, leads })
    }
}

impl ItemProcess<'_> {
    async fn until_end(
        &mut self,
        mut deadline: BootInstant,
        signals: &mut watch::Receiver<Option<Signal>>,
    ) -> ItemEnd {
        let (item, lease) = (self.item, self.item.lease());
        let extend_after = |pause: Duration| async move {
            sleep_until(&SystemClock, SystemClock.now() + pause).await;
            item.extend().await
        };
        // Kept over the turns of the loop. The item has its deadline only between two extensions, so nothing else reads it from there.
        let mut extension = std::pin::pin!(extend_after(lease / 4));
        let mut wake = next_wake(deadline);
        loop {
            tokio::select! {
                biased;
                _ = self.changes.recv() => {}
                () = sleep_until(&SystemClock, deadline.before(self.leads.term)) => return self.lose(deadline).await,
                Ok(()) = signals.changed() => {
                    if let Some(signal) = *signals.borrow_and_update() {
                        self.child.signal_group(signal);
                    }
                }
                () = sleep_until(&SystemClock, wake) => {
                    self.keep_watched(deadline);
                    wake = next_wake(deadline);
                }
                extended = &mut extension => {
                    let pause = match extended {
                        Ok(()) => lease / 4,
                        Err(Error::Lost(_) | Error::Stale { .. }) => return self.lose(deadline).await,
                        Err(error) => {
                            tracing::debug!(%error, "a lease could not be extended; trying again");
                            lease / 24
                        }
                    };
                    deadline = item.deadline().await;
                    self.keep_watched(deadline);
                    extension.set(extend_after(pause));
                }
            }
            // Checked after every wake-up: SIGCHLD is only a hint, because signals coalesce.
            if let Some(ProcessChange::Ended(code)) = self.child.change() {
                // A result counts, however late: the record decides whether it counts. A failure that comes too late may be the work
                // of the watchdog.
                return match code == 0 || SystemClock.now() < deadline {
                    true => ItemEnd::Itself(code),
                    false => self.lose(deadline).await,
                };
            }
            wake = self.child.watchdog_due().map_or(wake, |due| wake.min(due));
        }
    }

    fn keep_watched(&mut self, deadline: BootInstant) {
        let (name, fence) = (self.name, self.item.fence());
        self.child.keep_watched(deadline.before(self.leads.watchdog), || Watchdog::start(name, fence));
    }

    /// Ends the command, and everything that it has started, because its lease is lost: TERM, and KILL after the grace.
    async fn lose(&mut self, deadline: BootInstant) -> ItemEnd {
        let now = SystemClock.now();
        let kill_at = (now + self.grace).min(deadline.before(self.leads.kill));
        if kill_at > now {
            self.child.request_end();
        }
        if !self.child.end_before(&mut self.changes, kill_at, self.item.fence()).await {
            tracing::warn!("some processes of a command whose lease was lost could not be killed");
        }
        ItemEnd::LeaseLost
    }
}

/// When the supervisor next checks the watchdog.
fn next_wake(deadline: BootInstant) -> BootInstant {
    let now = SystemClock.now();
    now + (deadline.since(now) / 8).max(Duration::from_millis(10))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The turn of an item came when its lease was over, and its command ran beside that of the next worker.
    #[tokio::test]
    async fn a_command_is_not_started_after_its_lease() {
        let lease = Duration::from_millis(200);
        let keeper = lockkeeper::Lockkeeper::open("memory:").await.unwrap();
        let mut source = keeper.claim("work").unwrap().lease(lease).from(["one"]).unwrap();
        let item = source.try_take(1).await.unwrap().remove(0);
        let item = OwnItem::Claimed(Box::new(item), lease);
        sleep_until(&SystemClock, item.deadline().await).await;
        let command = [OsString::from("true")];
        let command = ItemCommand { command: &command, grace: Duration::ZERO, env: Vec::new(), json: false };
        let (_pass_on, mut passed) = watch::channel(None);
        let end = command.run(&item, &LockName::new("claim/work/one").unwrap(), &mut passed).await.unwrap();
        assert_eq!(end, ItemEnd::NotStarted);
    }
}
