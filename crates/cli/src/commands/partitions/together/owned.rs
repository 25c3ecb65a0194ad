//! The partitions that one command works on: together they are the lease of the command.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{FutureExt, select_all};
use lockkeeper::partitions::Partition;
use lockkeeper::{BootInstant, Clock, Fence, LockName, SystemClock, WallTime};
use lockkeeper_host::sleep_until;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::file::PartitionsFile;
use crate::child::CommandProcess;
use crate::child::lease::CommandLease;
use crate::child::supervisor::LeadTimes;
use crate::child::watchdog::Watchdog;

/// How often to look whether the command has finished a partition that leaves.
const LOOK: Duration = Duration::from_millis(50);
/// One write of the file and one HUP report all changes of this time.
const TOGETHER: Duration = Duration::from_millis(20);
/// The longest pause between two looks whether the command catches HUP by now, or whether the file can be written again.
const RETRY_MAX: Duration = Duration::from_secs(1);

/// A partition's number and fence: the same partition may come back with a higher fence.
pub type Tenure = (u32, Fence);

struct HeldPartition {
    partition: Rc<Partition>,
    /// Until when the command has to finish it, if the group wants it back.
    finish_by: Cell<Option<WallTime>>,
}

/// The partitions of the command, and which changes of them have not been reported to it.
pub struct OwnedPartitions {
    name: LockName,
    member: String,
    count: u32,
    ttl: Duration,
    grace: Duration,
    pub file: PartitionsFile,
    owned: RefCell<BTreeMap<Tenure, HeldPartition>>,
    /// The file has to be written again.
    unwritten: Cell<bool>,
    /// The command has not got its HUP for the file as it is.
    untold: Cell<bool>,
    /// When to notify the command next, and the pause after that if it cannot be notified then.
    tell_at: Cell<BootInstant>,
    retry: Cell<Duration>,
    /// When the command must have ended, whatever it owns.
    end_by: Cell<BootInstant>,
    /// The newest fence at the start of the command.
    tag: Cell<Fence>,
    changes: Notify,
}

impl OwnedPartitions {
    pub fn new(
        name: &LockName,
        member: &str,
        file: PartitionsFile,
        count: u32,
        ttl: Duration,
        grace: Duration,
    ) -> OwnedPartitions {
        OwnedPartitions {
            name: name.clone(),
            member: member.to_owned(),
            count,
            ttl,
            grace,
            file,
            owned: RefCell::default(),
            unwritten: Cell::new(true),
            untold: Cell::new(false),
            tell_at: Cell::new(BootInstant::from_nanos(0)),
            retry: Cell::new(TOGETHER),
            end_by: Cell::new(BootInstant::NEVER),
            tag: Cell::new(Fence::MIN),
            changes: Notify::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.owned.borrow().is_empty()
    }

    pub fn insert(&self, partition: Partition) {
        let tenure = (partition.number(), partition.fence());
        let owned = HeldPartition { partition: Rc::new(partition), finish_by: Cell::new(None) };
        self.owned.borrow_mut().insert(tenure, owned);
        self.change();
    }

    /// The group wants the partition back.
    pub fn leave(&self, tenure: Tenure) {
        let by = WallTime::from_micros(SystemClock.wall().as_micros() + self.grace.as_micros() as u64);
        if let Some(owned) = self.owned.borrow().get(&tenure) {
            owned.finish_by.set(Some(by));
        }
        self.change();
    }

    /// Takes the partition out. The lease of the command goes on without it.
    pub fn remove(&self, tenure: Tenure) -> Option<Rc<Partition>> {
        let removed = self.owned.borrow_mut().remove(&tenure);
        self.file.clear_done(tenure.0, tenure.1);
        self.change();
        removed.map(|owned| owned.partition)
    }

    /// All of them.
    pub fn tenures(&self) -> Vec<Tenure> {
        self.owned.borrow().keys().copied().collect()
    }

    /// The partitions that the group wants back.
    pub fn leaving(&self) -> Vec<Tenure> {
        let owned = self.owned.borrow();
        owned.iter().filter(|(_, owned)| owned.finish_by.get().is_some()).map(|(key, _)| *key).collect()
    }

    /// The partitions that are lost, or so nearly that no command can be started for them, and why.
    pub fn lost(&self) -> Vec<(Tenure, String)> {
        let term = |lease| LeadTimes::new(self.grace, lease, None).term;
        let owned = self.owned.borrow();
        let is_lost = |owned: &HeldPartition| {
            let guard = owned.partition.guard();
            guard.remaining() <= term(guard.lease())
        };
        let lost = owned.iter().filter(|(_, owned)| is_lost(owned));
        lost.map(|(key, owned)| (*key, owned.partition.guard().loss_reason().to_string())).collect()
    }

    /// The command must have ended when its grace is over, counted from now.
    pub fn end_after_grace(&self) {
        // The supervisor acts so long before a deadline.
        let lead = LeadTimes::new(self.grace, self.ttl, None).term;
        self.end_by.set(self.end_by.get().min(SystemClock.now() + self.grace + lead));
        self.change();
    }

    /// Completes when the command has finished some of those that leave. Dropping the future loses nothing.
    pub async fn finished(&self) -> Vec<Tenure> {
        loop {
            let mut changed = pin!(self.changes.notified());
            changed.as_mut().enable();
            let leaving = self.leaving();
            let is_done = |tenure: &Tenure| self.file.is_done(tenure.0, tenure.1);
            let done: Vec<Tenure> = leaving.iter().copied().filter(is_done).collect();
            if !done.is_empty() {
                return done;
            }
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep(LOOK), if !leaving.is_empty() => {}
            }
        }
    }

    /// Writes the file as a new command needs it.
    pub fn prepare(&self) -> io::Result<()> {
        self.tag.set(self.tenures().into_iter().map(|(_, fence)| fence).max().unwrap_or(Fence::MIN));
        self.file.write(&self.content())?;
        self.unwritten.set(false);
        self.untold.set(false);
        Ok(())
    }

    fn change(&self) {
        let soon = SystemClock.now() + TOGETHER;
        let pending = self.unwritten.get() || self.untold.get();
        self.tell_at.set(if pending { self.tell_at.get().min(soon) } else { soon });
        self.unwritten.set(true);
        self.retry.set(TOGETHER);
        self.changes.notify_waiters();
    }

    fn content(&self) -> Value {
        let owned = self.owned.borrow();
        let (mut partitions, mut leaving) = (Vec::new(), Vec::new());
        for ((number, fence), owned) in owned.iter() {
            match owned.finish_by.get() {
                None => partitions.push(json!({ "number": number, "fence": fence })),
                Some(by) => leaving.push(json!({
                    "number": number, "fence": fence, "finish_by_us": by, "done": self.file.done_path(*number, *fence),
                })),
            }
        }
        json!({
            "group": self.name, "count": self.count, "member": self.member, "partitions": partitions, "leaving": leaving,
        })
    }

    /// All guards, without a borrow of the table.
    fn partitions(&self) -> Vec<Rc<Partition>> {
        self.owned.borrow().values().map(|owned| owned.partition.clone()).collect()
    }
}

impl CommandLease for OwnedPartitions {
    fn deadline(&self) -> BootInstant {
        let owned = self.owned.borrow();
        let deadlines = owned.values().map(|owned| owned.partition.guard().deadline());
        deadlines.min().unwrap_or(BootInstant::NEVER).min(self.end_by.get())
    }

    fn ttl(&self) -> Duration {
        self.ttl
    }

    fn lease(&self) -> Duration {
        let owned = self.owned.borrow();
        owned.values().map(|owned| owned.partition.guard().lease()).min().unwrap_or(self.ttl)
    }

    fn is_held(&self) -> bool {
        SystemClock.now() < self.end_by.get()
            && self.owned.borrow().values().all(|owned| owned.partition.is_held())
    }

    fn loss_reason(&self) -> String {
        let owned = self.owned.borrow();
        let first = owned.values().min_by_key(|owned| owned.partition.guard().remaining());
        match first {
            Some(owned) => owned.partition.guard().loss_reason().to_string(),
            None => "the membership has ended, and the grace to finish is over".into(),
        }
    }

    fn tag(&self) -> Fence {
        self.tag.get()
    }

    fn start_watchdog(&self) -> io::Result<Watchdog> {
        let mut watchdog = Watchdog::start(&self.name, self.tag.get())?;
        watchdog.send_mark(&format!("{}={}", super::FILE, self.file.path()));
        watchdog.send_private_dir(&self.file.dir());
        Ok(watchdog)
    }

    async fn nearly_lost(&self, lead: Duration) {
        loop {
            let mut changed = pin!(self.changes.notified());
            changed.as_mut().enable();
            let partitions = self.partitions();
            let mut leases = vec![sleep_until(&SystemClock, self.end_by.get().before(lead)).boxed_local()];
            leases
                .extend(partitions.iter().map(|partition| partition.guard().nearly_lost(lead).boxed_local()));
            tokio::select! {
                biased;
                _ = select_all(leases) => return,
                () = changed => {}
            }
        }
    }

    async fn changed(&self) {
        loop {
            let mut changed = pin!(self.changes.notified());
            changed.as_mut().enable();
            if self.unwritten.get() || self.untold.get() {
                return sleep_until(&SystemClock, self.tell_at.get()).await;
            }
            changed.await;
        }
    }

    fn tell(&self, command: &CommandProcess) {
        self.tell_at.set(SystemClock.now() + self.retry.get());
        self.retry.set((self.retry.get() * 2).min(RETRY_MAX));
        if self.unwritten.get() {
            if let Err(error) = self.file.write(&self.content()) {
                tracing::warn!(%error, "the command cannot be told of its partitions; trying again");
                return;
            }
            self.unwritten.set(false);
            self.untold.set(true);
        }
        if self.untold.get() && command.hang_up() {
            self.untold.set(false);
        }
    }

    fn remaining(&self) -> Duration {
        // Without a partition there is no deadline.
        let left = self.deadline().since(SystemClock.now()).min(self.ttl);
        if self.is_held() { left } else { Duration::ZERO }
    }
}
