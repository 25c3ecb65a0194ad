//! The asks of this process that stand in line, and what it watches for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use lockkeeper_core::{Acquired, Ask, Attempt, LockName, Moment, Result};
use tokio::sync::oneshot;

use crate::line::Outlook;
use crate::rows::Ticket;

pub(crate) type Teller = oneshot::Sender<Result<Acquired>>;

/// An ask that stands in line for somebody of this process.
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
}

impl Locals {
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds an ask. Asked again, the newer asker is answered.
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
            if let Some(line) = self.lines.get_mut(name) {
                line.tickets.remove(&ticket);
                if line.tickets.is_empty() {
                    self.lines.remove(name);
                }
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
        std::mem::take(self).waiting.into_values().collect()
    }

    /// Whether somebody still waits for the answer.
    pub fn wants(&self, ticket: Ticket) -> bool {
        self.waiting.get(&ticket).is_some_and(|local| !local.tell.is_closed())
    }

    pub fn has(&self, ticket: Ticket) -> bool {
        self.waiting.contains_key(&ticket)
    }

    /// Whose patience is over.
    pub fn overdue(&self, now: Moment) -> Vec<Ticket> {
        let over = self.patience.range(..=(now, Ticket::MAX));
        over.map(|(_, ticket)| *ticket).collect()
    }

    /// The names that somebody of ours waits for.
    pub fn names(&self) -> Vec<LockName> {
        self.lines.keys().cloned().collect()
    }

    /// The names that this one waits for.
    pub fn names_of(&self, ticket: Ticket) -> Vec<LockName> {
        let local = self.waiting.get(&ticket);
        local.map(|local| local.ask.claim.names.iter().cloned().collect()).unwrap_or_default()
    }

    /// The names of which a lease or a delay is over by now.
    pub fn due(&self, now: Moment) -> Vec<LockName> {
        let due = self.lines.iter().filter(|(_, line)| line.outlook.due.is_some_and(|due| due <= now));
        due.map(|(name, _)| name.clone()).collect()
    }

    /// Our first ticket in the line of a name.
    pub fn first(&self, name: &LockName) -> Option<Ticket> {
        self.lines.get(name)?.tickets.first().copied()
    }

    pub fn set_outlook(&mut self, name: &LockName, outlook: Outlook) {
        if let Some(line) = self.lines.get_mut(name) {
            line.outlook = outlook;
        }
    }

    /// When something is to be done next.
    pub fn next_due(&self) -> Option<Moment> {
        let lines = self.lines.values().filter_map(|line| line.outlook.due);
        lines.chain(self.patience.first().map(|(until, _)| *until)).min()
    }

    /// All processes whose end would let somebody go on.
    pub fn guards(&self) -> BTreeSet<(u32, u64, u64)> {
        self.lines.values().flat_map(|line| line.outlook.guards.iter().copied()).collect()
    }
}
