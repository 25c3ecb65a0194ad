//! The waiters of this process: their requests, and what the process watches for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use lockkeeper_core::{AcquireOutcome, Attempt, BootInstant, LockName, LockRequest, Result};
use tokio::sync::oneshot;

use crate::codec::QueueTicket;

pub(crate) type ReplySender = oneshot::Sender<Result<AcquireOutcome>>;

/// A process whose end the kernel reports: its pid, start time and namespace.
pub(crate) type WatchedProcess = (u32, u64, u64);

/// The conditions that can free a lock for the first waiter of this process in its queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WakeConditions {
    /// The end of one of these processes.
    pub processes: BTreeSet<WatchedProcess>,
    /// The end of a lease or a lock-delay.
    pub due: Option<BootInstant>,
}

/// A request in the queue, and the caller in this process that waits for its answer.
#[derive(Debug)]
pub(crate) struct LocalWaiter {
    pub request: LockRequest,
    pub until: BootInstant,
    pub reply: ReplySender,
}

/// The waiters of this process for one name.
#[derive(Debug, Default)]
struct NameWaiters {
    tickets: BTreeSet<QueueTicket>,
    conditions: WakeConditions,
}

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    waiting: BTreeMap<QueueTicket, LocalWaiter>,
    tickets: HashMap<Attempt, QueueTicket>,
    names: BTreeMap<LockName, NameWaiters>,
    /// The ends of the waits, in order.
    deadlines: BTreeSet<(BootInstant, QueueTicket)>,
    /// The ends of leases and lock-delays, in order, so that no search goes through all waiters.
    dues: BTreeSet<(BootInstant, LockName)>,
    /// The watched processes, and for how many names each is watched.
    processes: BTreeMap<WatchedProcess, usize>,
    processes_changed: bool,
}

impl Waiters {
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a waiter. If the same request already waits, its newer caller gets the answer.
    pub fn add(&mut self, ticket: QueueTicket, waiter: LocalWaiter) {
        self.remove(ticket);
        self.tickets.insert(waiter.request.key.attempt, ticket);
        for name in &waiter.request.key.names {
            self.names.entry(name.clone()).or_default().tickets.insert(ticket);
        }
        if waiter.until < BootInstant::NEVER {
            self.deadlines.insert((waiter.until, ticket));
        }
        self.waiting.insert(ticket, waiter);
    }

    pub fn remove(&mut self, ticket: QueueTicket) -> Option<LocalWaiter> {
        let waiter = self.waiting.remove(&ticket)?;
        self.tickets.remove(&waiter.request.key.attempt);
        self.deadlines.remove(&(waiter.until, ticket));
        for name in &waiter.request.key.names {
            let Some(of_name) = self.names.get_mut(name) else { continue };
            of_name.tickets.remove(&ticket);
            if of_name.tickets.is_empty() {
                self.set_wake_conditions(name, WakeConditions::default());
                self.names.remove(name);
            }
        }
        Some(waiter)
    }

    pub fn remove_attempt(&mut self, attempt: &Attempt) {
        if let Some(ticket) = self.tickets.get(attempt).copied() {
            self.remove(ticket);
        }
    }

    pub fn take_all(&mut self) -> Vec<LocalWaiter> {
        let all = std::mem::take(self);
        self.processes_changed = true;
        all.waiting.into_values().collect()
    }

    /// Whether the caller of a request still waits for the answer.
    pub fn has_caller(&self, ticket: QueueTicket) -> bool {
        self.waiting.get(&ticket).is_some_and(|waiter| !waiter.reply.is_closed())
    }

    pub fn has(&self, ticket: QueueTicket) -> bool {
        self.waiting.contains_key(&ticket)
    }

    /// At most `most` waiters whose time is over.
    pub fn overdue(&self, now: BootInstant, most: usize) -> Vec<QueueTicket> {
        let over = self.deadlines.range(..=(now, QueueTicket::MAX));
        over.take(most).map(|(_, ticket)| *ticket).collect()
    }

    /// All names with waiters.
    pub fn names(&self) -> impl Iterator<Item = LockName> {
        self.names.keys().cloned()
    }

    /// The names of one waiter's request.
    pub fn names_of(&self, ticket: QueueTicket) -> Vec<LockName> {
        let waiter = self.waiting.get(&ticket);
        waiter.map(|waiter| waiter.request.key.names.iter().cloned().collect()).unwrap_or_default()
    }

    /// The names for which a lease or a lock-delay has ended by now.
    pub fn due(&self, now: BootInstant) -> Vec<LockName> {
        self.dues.iter().take_while(|(due, _)| *due <= now).map(|(_, name)| name.clone()).collect()
    }

    /// The first ticket of this process in the queue of a name.
    pub fn first(&self, name: &LockName) -> Option<QueueTicket> {
        self.names.get(name)?.tickets.first().copied()
    }

    pub fn set_wake_conditions(&mut self, name: &LockName, conditions: WakeConditions) {
        let Some(of_name) = self.names.get_mut(name) else { return };
        if of_name.conditions == conditions {
            return;
        }
        let old = std::mem::replace(&mut of_name.conditions, conditions);
        let new = &of_name.conditions;
        if old.due != new.due {
            old.due.map(|due| self.dues.remove(&(due, name.clone())));
            self.dues.extend(new.due.map(|due| (due, name.clone())));
        }
        for process in &new.processes {
            *self.processes.entry(*process).or_default() += 1;
        }
        for process in &old.processes {
            let count = self.processes.get_mut(process).expect("it was counted");
            *count -= 1;
            if *count == 0 {
                self.processes.remove(process);
            }
        }
        self.processes_changed |= old.processes != new.processes;
    }

    /// The next instant at which a wait, a lease or a lock-delay ends.
    pub fn next_due(&self) -> Option<BootInstant> {
        let due = self.dues.first().map(|(due, _)| *due);
        due.into_iter().chain(self.deadlines.first().map(|(until, _)| *until)).min()
    }

    /// The processes to watch, if they have changed since the last call.
    pub fn changed_processes(&mut self) -> Option<BTreeSet<WatchedProcess>> {
        std::mem::take(&mut self.processes_changed).then(|| self.processes.keys().copied().collect())
    }

    /// Makes the next [`Waiters::changed_processes`] return all processes, to retry those that could not be watched.
    pub fn watch_processes_again(&mut self) {
        self.processes_changed = true;
    }
}
