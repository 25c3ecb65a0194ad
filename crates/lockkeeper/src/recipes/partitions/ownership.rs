//! The task that owns a member's partitions: it requests the locks of those that the group assigns to the member, and gives up the others.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lockkeeper_core::lease::LossReason;
use lockkeeper_core::{BootInstant, EventStream, Fence, Purpose, Result};
use lockkeeper_host::{Clock, sleep_until};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::heartbeat::{GroupView, Presence};
use super::member::PartitionChange;
use super::partition::{Dropped, DroppedPartition, Partition};
use super::record::{GroupRecord, MemberRecord};
use super::{PartitionNames, Partitions};
use crate::guard::{Guard, GuardRevoker};

/// How long the old owner may take to end its work after its grace, at most, before it is revoked.
const TO_END: Duration = Duration::from_secs(2);
/// The longest time until a watch that ended or could not be started is started again.
const REWATCH: Duration = Duration::from_secs(5);

/// A partition whose handle the user has.
struct OwnedPartition {
    fence: Fence,
    hold: GuardRevoker,
    draining: watch::Sender<bool>,
    /// When the grace is over; `None` while the partition is assigned to this member.
    drained_by: Option<BootInstant>,
}

/// A partition whose lock is requested.
struct RequestedPartition {
    task: AbortHandle,
    /// Since when, or when its holder was revoked last.
    since: BootInstant,
}

/// The result of a background task of the owner.
enum TaskResult {
    Acquired(u32, Result<Guard>),
    Revoked(u32, Result<Fence>),
}

/// The task that requests, hands out and takes back the partitions of one member.
pub(super) struct PartitionOwnership {
    options: Partitions,
    names: PartitionNames,
    me: MemberRecord,
    clock: Arc<dyn Clock>,
    owned: BTreeMap<u32, OwnedPartition>,
    requested: BTreeMap<u32, RequestedPartition>,
    /// Partitions whose request failed, and when it is sent again.
    paused: BTreeMap<u32, BootInstant>,
    tasks: JoinSet<TaskResult>,
    /// The news of the partitions that the user has dropped.
    dropped: (mpsc::UnboundedSender<DroppedPartition>, mpsc::UnboundedReceiver<DroppedPartition>),
    changes: mpsc::UnboundedSender<Result<PartitionChange>>,
    leaving: bool,
    /// How long after a request its holder is revoked.
    patience: Duration,
}

impl PartitionOwnership {
    pub fn new(
        options: Partitions,
        names: PartitionNames,
        me: MemberRecord,
        changes: mpsc::UnboundedSender<Result<PartitionChange>>,
    ) -> Self {
        let patience = options.grace;
        PartitionOwnership {
            patience,
            clock: options.keeper.0.clock.clone(),
            options,
            names,
            me,
            owned: BTreeMap::new(),
            requested: BTreeMap::new(),
            paused: BTreeMap::new(),
            tasks: JoinSet::new(),
            dropped: mpsc::unbounded_channel(),
            changes,
            leaving: false,
        }
    }

    /// Runs until the member has left and given up all its partitions, or their grace is over.
    pub async fn run(
        mut self,
        mut view: watch::Receiver<GroupView>,
        presence: &watch::Sender<Presence>,
        mut wanted: watch::Receiver<Presence>,
        wake: Arc<Notify>,
    ) {
        let mut events = LockEvents::new(&self.options, &self.names);
        loop {
            let newest = view.borrow_and_update().clone();
            match &newest {
                GroupView::Joined(record) => self.follow(record),
                GroupView::Ended(_) => self.leave(),
            }
            if *wanted.borrow_and_update() == Presence::Leaving {
                self.leave();
            }
            self.end_drained();
            if self.leaving && self.owned.is_empty() {
                break;
            }
            let next = self.next_deadline();
            tokio::select! {
                changed = view.changed(), if !matches!(newest, GroupView::Ended(_)) => if changed.is_err() { break },
                _ = wanted.changed(), if !self.leaving => {}
                Some((number, fence)) = self.dropped.1.recv() => self.handle_drop(number, fence),
                Some(done) = self.tasks.join_next() => self.handle_result(done.ok()),
                () = events.next() => wake.notify_one(),
                () = sleep_until(&*self.clock, next) => self.revoke_holders(&newest),
            }
        }
        self.tasks.shutdown().await;
        // The releases of dropped partitions run in the background: the member leaves when they are done, or have failed for a ttl. Those
        // of other locks of this keeper may take longer.
        let give_up = self.clock.now() + self.options.ttl;
        tokio::select! {
            () = self.options.keeper.settle() => {}
            () = sleep_until(&*self.clock, give_up) => {}
        }
        presence.send_replace(Presence::Gone);
    }

    /// Requests what the group assigns to this member, and gives up the rest.
    fn follow(&mut self, record: &GroupRecord) {
        let now = self.clock.now();
        self.paused.retain(|_, until| *until > now);
        // An old owner reads the record at its next poll, has its grace, and then has to end its work.
        let grace = record.members.iter().map(MemberRecord::grace).max().unwrap_or(self.options.grace);
        self.patience = grace + self.options.poll * 2 + (self.options.ttl / 4).min(TO_END);
        for number in 0..record.count {
            let mine = !self.leaving && record.owner(number).is_some_and(|owner| owner.id == self.me.id);
            let (owned, requested) = (self.owned.contains_key(&number), self.requested.contains_key(&number));
            match (mine, owned, requested) {
                (true, false, false) if !self.paused.contains_key(&number) => self.request(number),
                (false, true, _) => self.drain(number),
                (false, false, true) => self.withdraw(number),
                _ => {}
            }
        }
    }

    fn request(&mut self, number: u32) {
        let builder =
            self.options.keeper.lock(self.names.lock(number)).ttl(self.options.ttl).label(&self.me.name);
        let builder = match self.options.purpose {
            Purpose::Efficiency => builder,
            Purpose::Correctness => builder.for_correctness(),
        };
        let task = self.tasks.spawn(async move { TaskResult::Acquired(number, builder.acquire().await) });
        self.requested.insert(number, RequestedPartition { task, since: self.clock.now() });
    }

    /// Takes a request back. If the store has granted it meanwhile, the keeper releases the lock in the background.
    fn withdraw(&mut self, number: u32) {
        if let Some(requested) = self.requested.remove(&number) {
            requested.task.abort();
        }
    }

    /// Tells the user of a partition to finish, once.
    fn drain(&mut self, number: u32) {
        let by = self.clock.now() + self.options.grace;
        let Some(owned) = self.owned.get_mut(&number).filter(|owned| owned.drained_by.is_none()) else {
            return;
        };
        owned.drained_by = Some(by);
        owned.draining.send_replace(true);
        let _ = self.changes.send(Ok(PartitionChange::Revoked { number, fence: owned.fence }));
    }

    /// Ends the holds whose grace is over. The lock is released when the user drops the partition; if that does not happen, no other member
    /// gets it before the lease is over.
    fn end_drained(&mut self) {
        let now = self.clock.now();
        for (number, owned) in &self.owned {
            if owned.drained_by.is_some_and(|by| now >= by) {
                owned.hold.end(LossReason::Reassigned);
                tracing::debug!(group = self.names.group, number, "the grace of a revoked partition is over");
            }
        }
        let ended = |owned: &OwnedPartition| owned.drained_by.is_some_and(|by| now >= by);
        self.owned.retain(|_, owned| !ended(owned));
    }

    fn leave(&mut self) {
        if std::mem::replace(&mut self.leaving, true) {
            return;
        }
        // No request is sent again. A time that has passed would wake this task at once, again and again.
        self.paused.clear();
        let requested: Vec<u32> = self.requested.keys().copied().collect();
        requested.into_iter().for_each(|number| self.withdraw(number));
        let owned: Vec<u32> = self.owned.keys().copied().collect();
        owned.into_iter().for_each(|number| self.drain(number));
    }

    fn handle_drop(&mut self, number: u32, fence: Fence) {
        // A partition may be dropped after its successor was granted.
        if self.owned.get(&number).is_some_and(|owned| owned.fence == fence) {
            self.owned.remove(&number);
        }
    }

    fn handle_result(&mut self, done: Option<TaskResult>) {
        match done {
            Some(TaskResult::Acquired(number, acquired)) => {
                // A request that was withdrawn in the last moment: dropping the guard releases the lock.
                if self.requested.remove(&number).is_none() {
                    return;
                }
                match acquired {
                    Ok(guard) => self.hand_out(number, guard),
                    Err(error) => {
                        tracing::debug!(group = self.names.group, number, %error, "could not acquire a partition; trying again");
                        self.paused.insert(number, self.clock.now() + self.options.poll);
                    }
                }
            }
            Some(TaskResult::Revoked(number, Ok(_))) => {
                tracing::info!(
                    group = self.names.group,
                    number,
                    "revoked a partition whose owner did not give it up"
                );
            }
            Some(TaskResult::Revoked(number, Err(error))) => {
                tracing::debug!(group = self.names.group, number, %error, "could not revoke a partition; waiting for its lease");
            }
            // A task that was withdrawn.
            None => {}
        }
    }

    fn hand_out(&mut self, number: u32, guard: Guard) {
        let (draining, drained) = watch::channel(false);
        let (fence, hold) = (guard.fence(), guard.revoker());
        let dropped = Dropped { number, fence, to: self.dropped.0.clone() };
        let partition = Partition { guard, number, count: self.options.count, draining: drained, dropped };
        self.owned.insert(number, OwnedPartition { fence, hold, draining, drained_by: None });
        // If the user has dropped the member, the partition is dropped here, and its lock released.
        let _ = self.changes.send(Ok(PartitionChange::Owned(partition)));
    }

    /// Revokes the holders that keep a partition past their grace: processes that are stuck, and still renew.
    fn revoke_holders(&mut self, view: &GroupView) {
        let now = self.clock.now();
        let GroupView::Joined(_) = view else { return };
        let patience = self.patience;
        for (number, requested) in self.requested.iter_mut().filter(|(_, r)| now >= r.since + patience) {
            let (number, keeper) = (*number, self.options.keeper.clone());
            let lock = self.names.lock(number);
            requested.since = now;
            if keeper.profile().revoke {
                let reason = format!("the partition is assigned to {}, and the grace is over", self.me.name);
                self.tasks
                    .spawn(async move { TaskResult::Revoked(number, keeper.revoke(lock, &reason).await) });
            }
        }
    }

    fn next_deadline(&self) -> BootInstant {
        let drained = self.owned.values().filter_map(|owned| owned.drained_by);
        let revoked = self.requested.values().map(|requested| requested.since + self.patience);
        drained.chain(revoked).chain(self.paused.values().copied()).min().unwrap_or(BootInstant::NEVER)
    }
}

/// The events of the group's locks. An event is only a hint to read the record now: the poll stays behind it.
struct LockEvents {
    options: Partitions,
    prefix: String,
    stream: Option<EventStream>,
    /// When a watch may be started again.
    retry_at: BootInstant,
}

impl LockEvents {
    fn new(options: &Partitions, names: &PartitionNames) -> Self {
        LockEvents {
            options: options.clone(),
            prefix: names.prefix(),
            stream: None,
            retry_at: BootInstant::from_nanos(0),
        }
    }

    /// Completes with the next event. May be dropped at any await point.
    async fn next(&mut self) {
        // A watcher of a Redis Cluster marks each of the 16,384 slots anew every few seconds, which would cost more than it brings.
        let profile = self.options.keeper.profile();
        if !profile.watch || profile.store.ends_with("+cluster") {
            return pending().await;
        }
        let clock = &*self.options.keeper.0.clock;
        loop {
            if let Some(events) = &mut self.stream {
                match events.next().await {
                    Some(Ok(_)) => return,
                    _ => self.stream = None,
                }
            }
            sleep_until(clock, self.retry_at).await;
            self.stream = self.options.keeper.watch(&self.prefix).await.ok();
            self.retry_at = clock.now() + REWATCH;
        }
    }
}
