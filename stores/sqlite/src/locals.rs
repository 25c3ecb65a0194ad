//! The requests of this process that wait in a queue, and what it watches for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use lockkeeper_core::{Acquired, Ask, Attempt, LockName, Moment, Result};
use tokio::sync::oneshot;

use crate::line::{Guard, Outlook};
use crate::rows::Ticket;

pub(crate) type Teller = oneshot::Sender<Result<Acquired>>;

/// A request that waits for somebody of this process.
#[derive(Debug)]
pub(crate) struct Local {
    pub ask: Ask,
    pub until: Moment,
    pub tell: Teller,
}

#[derive(Debug, Default)]
struct Line {
    tickets: BTreeSet<Ticket>,
    outlook: Outlook,
}

#[derive(Debug, Default)]
pub(crate) struct Locals {
    waiting: BTreeMap<Ticket, Local>,
    tickets: HashMap<Attempt, Ticket>,
    lines: BTreeMap<LockName, Line>,
    patience: BTreeSet<(Moment, Ticket)>,
    /// When a lease or a delay ends, in order: a crowd is not looked through each time.
    dues: BTreeSet<(Moment, LockName)>,
    /// The processes to watch, and for how many names.
    guards: BTreeMap<Guard, usize>,
    guards_changed: bool,
}

impl Locals {
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a request. Asked again, the newer asker is answered.
    pub fn add(&mut self, ticket: Ticket, local: Local) {
        self.remove(ticket);
        self.tickets.insert(local.ask.claim.attempt, ticket);
        for name in &local.ask.claim.names {
            self.lines.entry(name.clone()).or_default().tickets.insert(ticket);
        }
        if local.until < Moment::NEVER {
            self.patience.insert((local.until, ticket));
        }
        self.waiting.insert(ticket, local);
    }

    pub fn remove(&mut self, ticket: Ticket) -> Option<Local> {
        let local = self.waiting.remove(&ticket)?;
        self.tickets.remove(&local.ask.claim.attempt);
        self.patience.remove(&(local.until, ticket));
        for name in &local.ask.claim.names {
            let Some(line) = self.lines.get_mut(name) else { continue };
            line.tickets.remove(&ticket);
            if line.tickets.is_empty() {
                self.set_outlook(name, Outlook::default());
                self.lines.remove(name);
            }
        }
        Some(local)
    }

    pub fn forget(&mut self, attempt: &Attempt) {
        if let Some(ticket) = self.tickets.get(attempt).copied() {
            self.remove(ticket);
        }
    }

    pub fn take_all(&mut self) -> Vec<Local> {
        let all = std::mem::take(self);
        self.guards_changed = true;
        all.waiting.into_values().collect()
    }

    /// Whether somebody still waits for the answer.
    pub fn wants(&self, ticket: Ticket) -> bool {
        self.waiting.get(&ticket).is_some_and(|local| !local.tell.is_closed())
    }

    pub fn has(&self, ticket: Ticket) -> bool {
        self.waiting.contains_key(&ticket)
    }

    /// Whose patience is over, at most so many of them.
    pub fn overdue(&self, now: Moment, most: usize) -> Vec<Ticket> {
        let over = self.patience.range(..=(now, Ticket::MAX));
        over.take(most).map(|(_, ticket)| *ticket).collect()
    }

    /// The names that somebody of ours waits for.
    pub fn names(&self) -> impl Iterator<Item = LockName> {
        self.lines.keys().cloned()
    }

    /// The names that this one waits for.
    pub fn names_of(&self, ticket: Ticket) -> Vec<LockName> {
        let local = self.waiting.get(&ticket);
        local.map(|local| local.ask.claim.names.iter().cloned().collect()).unwrap_or_default()
    }

    /// The names of which a lease or a delay is over by now.
    pub fn due(&self, now: Moment) -> Vec<LockName> {
        self.dues.iter().take_while(|(due, _)| *due <= now).map(|(_, name)| name.clone()).collect()
    }

    /// Our first ticket in the queue of a name.
    pub fn first(&self, name: &LockName) -> Option<Ticket> {
        self.lines.get(name)?.tickets.first().copied()
    }

    pub fn set_outlook(&mut self, name: &LockName, outlook: Outlook) {
        let Some(line) = self.lines.get_mut(name) else { return };
        if line.outlook == outlook {
            return;
        }
        let old = std::mem::replace(&mut line.outlook, outlook);
        let new = &line.outlook;
        if old.due != new.due {
            old.due.map(|due| self.dues.remove(&(due, name.clone())));
            self.dues.extend(new.due.map(|due| (due, name.clone())));
        }
        for guard in &new.guards {
            *self.guards.entry(*guard).or_default() += 1;
        }
        for guard in &old.guards {
            let count = self.guards.get_mut(guard).expect("it was counted");
            *count -= 1;
            if *count == 0 {
                self.guards.remove(guard);
            }
        }
        self.guards_changed |= old.guards != new.guards;
    }

    /// When something is to be done next.
    pub fn next_due(&self) -> Option<Moment> {
        let due = self.dues.first().map(|(due, _)| *due);
        due.into_iter().chain(self.patience.first().map(|(until, _)| *until)).min()
    }

    /// All processes whose end would let somebody go on, if they are others than the last time.
    pub fn changed_guards(&mut self) -> Option<BTreeSet<Guard>> {
        std::mem::take(&mut self.guards_changed).then(|| self.guards.keys().copied().collect())
    }

    /// Those that could not be watched are tried again.
    pub fn watch_guards_again(&mut self) {
        self.guards_changed = true;
    }
}
