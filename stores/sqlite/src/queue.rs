//! The queue of waiters as stored: first come, first served, for every name of a request.
//!
//! A process grants locks only to its own requests. When a lock becomes free, the releasing process wakes the process of
//! the queue's head, which takes the lock in a transaction of its own. All other requests find the queue and join its end.

use std::collections::BTreeSet;

use lockkeeper_core::admission::Admission;
use lockkeeper_core::{AcquireOutcome, BootInstant, Error, EventKind, LockName, LockRequest, Owner, Result};
use lockkeeper_host::{Liveness, Process};
use rusqlite::params;

use crate::codec::{
    QueueTicket, StoredWaiter, duration_nanos, instant_nanos, mode_number, names_text, signed,
};
use crate::error::sql_error;
use crate::statements;
use crate::transaction::Tx;
use crate::waiters::WakeConditions;
use crate::wake_pipe::{Peer, PeerState};

impl Tx<'_> {
    /// Appends a request to the queues of all its names.
    pub fn enqueue(&mut self, request: &LockRequest) -> Result<(QueueTicket, BootInstant)> {
        if let Some(owner) = request.owner {
            self.refuse_deadlock(owner, request)?;
        }
        self.identity.wake_pipe()?;
        let until = request.wait.deadline(self.now.moment);
        let ticket = self.next_ticket();
        let LockRequest { key, owner, mode, ttl, lock_delay, min_hold, holder, .. } = request;
        let process = &self.identity.process;
        self.change(
            statements::ADD_WAITER,
            params![
                ticket,
                key.attempt.as_bytes(),
                self.identity.peer,
                names_text(&key.names),
                owner.map(|owner| *owner.as_bytes()),
                mode_number(*mode),
                instant_nanos(until),
                signed(self.now.wall.as_micros()),
                duration_nanos(*ttl),
                duration_nanos(*lock_delay),
                duration_nanos(*min_hold),
                holder.host,
                holder.pid,
                holder.label,
                process.pid,
                signed(process.start),
                signed(process.namespace)
            ],
        )?;
        for name in &key.names {
            let row = params![name.as_str(), ticket, self.identity.peer, instant_nanos(until)];
            self.change(statements::ADD_QUEUE_ENTRY, row)?;
        }
        self.record_event(key.names.as_slice(), &EventKind::Waiting, Some(holder))?;
        self.queue_lengths.clear();
        self.enqueued.insert(ticket);
        Ok((ticket, until))
    }

    /// Moves the queue entry of a request to this process, which has received the request again.
    pub fn take_over(&mut self, ticket: QueueTicket) -> Result<BootInstant> {
        let Some(entry) = self.entry(ticket)? else { return Ok(self.now.moment) };
        if entry.peer == self.identity.peer {
            return Ok(entry.until);
        }
        self.identity.wake_pipe()?;
        let (peer, process) = (self.identity.peer, &self.identity.process);
        let row = params![ticket, peer, process.pid, signed(process.start), signed(process.namespace)];
        self.change(statements::MOVE_WAITER, row)?;
        for name in &entry.request.key.names {
            self.change(statements::MOVE_QUEUE_ENTRY, params![name.as_str(), ticket, peer])?;
        }
        self.wake_peer(entry.peer, ticket);
        self.enqueued.insert(ticket);
        Ok(entry.until)
    }

    pub fn entry(&self, ticket: QueueTicket) -> Result<Option<StoredWaiter>> {
        self.one(statements::WAITER, [ticket], StoredWaiter::read)
    }

    /// The length of a queue. A transaction counts it once, because thousands of waiters may time out together, and each
    /// of their answers has this number.
    pub fn queue_length(&mut self, name: &LockName) -> Result<usize> {
        if let Some(length) = self.queue_lengths.get(name) {
            return Ok(*length);
        }
        let length = self.one(statements::QUEUE_LENGTH, [name.as_str()], |row| row.get::<_, u32>(0))?;
        let length = length.unwrap_or(0) as usize;
        self.queue_lengths.insert(name.clone(), length);
        Ok(length)
    }

    /// The first waiter of a queue that can be granted the lock. The search skips
    /// - a waiter whose process is silent, which keeps its position,
    /// - a waiter whose process is gone, and removes it,
    /// - a waiter of this process whose caller has gone, and removes it,
    /// - a waiter of another process whose time is over, which that process removes.
    pub fn queue_head(&mut self, name: &LockName) -> Result<Option<QueueTicket>> {
        let (mut dead_peers, mut abandoned) = (Vec::new(), Vec::new());
        let head = {
            let sql = self.sql;
            let mut queue = sql.prepare_cached(statements::QUEUE).map_err(sql_error)?;
            let mut queue = queue.query([name.as_str()]).map_err(sql_error)?;
            let now = instant_nanos(self.now.moment);
            loop {
                let Some(row) = queue.next().map_err(sql_error)? else { break None };
                let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
                let (ticket, peer, until): (QueueTicket, Peer, i64) = read(row).map_err(sql_error)?;
                match self.peer_state(&peer) {
                    PeerState::Alive if peer == self.identity.peer && !self.has_caller(ticket) => {
                        abandoned.push(ticket)
                    }
                    PeerState::Alive if until >= now || peer == self.identity.peer => break Some(ticket),
                    PeerState::Alive | PeerState::Silent => {}
                    PeerState::Gone if dead_peers.contains(&peer) => {}
                    PeerState::Gone => dead_peers.push(peer),
                }
            }
        };
        for peer in dead_peers {
            self.remove_dead_peer(&peer)?;
        }
        for ticket in abandoned {
            self.remove_abandoned_entry(ticket)?;
        }
        Ok(head)
    }

    /// Removes the queue entries, the watcher row and the pipe of an open store that is gone.
    pub fn remove_dead_peer(&mut self, peer: &Peer) -> Result<()> {
        self.needs_write = true;
        if !self.writes {
            return Ok(());
        }
        for entry in self.all(statements::WAITERS_OF_PEER, [peer], StoredWaiter::read)? {
            self.drop_entry(&entry)?;
        }
        self.change(statements::REMOVE_WATCHER, [peer])?;
        self.identity.pipes.remove_pipe(peer);
        Ok(())
    }

    /// Removes a queue entry of this process whose caller has gone: it would block the waiters behind it.
    pub fn remove_abandoned_entry(&mut self, ticket: QueueTicket) -> Result<()> {
        self.needs_write = true;
        match self.entry(ticket)?.filter(|_| self.writes) {
            Some(entry) => self.drop_entry(&entry),
            None => Ok(()),
        }
    }

    fn remove_entry(&mut self, entry: &StoredWaiter) -> Result<()> {
        self.change(statements::REMOVE_WAITER, [entry.ticket])?;
        for name in &entry.request.key.names {
            self.change(statements::REMOVE_QUEUE_ENTRY, params![name.as_str(), entry.ticket])?;
            if let Some(length) = self.queue_lengths.get_mut(name) {
                *length = length.saturating_sub(1);
            }
        }
        self.mark_changed(&entry.request.key.names);
        Ok(())
    }

    /// Removes a queue entry that gets no grant.
    pub fn drop_entry(&mut self, entry: &StoredWaiter) -> Result<()> {
        self.remove_entry(entry)?;
        let names = entry.request.key.names.as_slice();
        self.record_event(names, &EventKind::Left, Some(&entry.request.holder))
    }

    /// Removes a request from the queue because a caller has withdrawn it, and wakes the process that waits for it.
    pub fn withdraw_ticket(&mut self, ticket: QueueTicket) -> Result<()> {
        let Some(entry) = self.entry(ticket)? else { return Ok(()) };
        self.drop_entry(&entry)?;
        if entry.peer != self.identity.peer {
            self.wake_peer(entry.peer, ticket);
        }
        Ok(())
    }

    /// Answers requests whose time is over: with a grant if the lock is free at this last moment, else with `Busy`.
    pub fn time_out(&mut self, tickets: &[QueueTicket]) -> Result<()> {
        for ticket in tickets {
            let Some(entry) = self.entry(*ticket)? else { continue };
            if entry.peer == self.identity.peer && !self.try_grant(&entry)? {
                self.drop_entry(&entry)?;
                let busy = self.busy(&entry.request, *ticket)?;
                self.after.replies.push((*ticket, Ok(AcquireOutcome::Busy(busy))));
                self.grant_waiters()?;
            }
        }
        Ok(())
    }

    /// Serves the queues of all changed names, the earliest ticket first, until no head can be granted its lock. A head of
    /// this process gets its grant here; the process of another head is woken.
    pub fn grant_waiters(&mut self) -> Result<()> {
        let mut heads = BTreeSet::new();
        loop {
            while let Some(name) = self.changed_names.pop_first() {
                heads.extend(self.queue_head(&name)?);
            }
            let Some(head) = heads.pop_first() else { return Ok(()) };
            if let Some(entry) = self.entry(head)? {
                self.try_grant(&entry)?;
            }
        }
    }

    /// Grants a waiter its lock if the admission rule allows that. Returns whether the entry left the queue.
    pub fn try_grant(&mut self, entry: &StoredWaiter) -> Result<bool> {
        let own = entry.peer == self.identity.peer;
        if own && !self.has_caller(entry.ticket) {
            self.drop_entry(entry)?;
            return Ok(true);
        }
        let admission = self.evaluate_request(&entry.request, Some(entry.ticket))?;
        if matches!(admission, Admission::Blocked | Admission::Upgrade) {
            return Ok(false);
        }
        if !own {
            self.wake_peer(entry.peer, entry.ticket);
            return Ok(false);
        }
        let fence = match admission {
            Admission::Reenter(fence) => Ok(fence),
            _ => self.next_fence(),
        };
        self.remove_entry(entry)?;
        match fence {
            Ok(fence) => {
                let grant = self.insert_hold(&entry.request, fence)?;
                self.after.replies.push((entry.ticket, Ok(AcquireOutcome::Granted(grant))));
                if let Some(owner) = entry.request.owner {
                    self.grant_reentries_of(owner, entry)?;
                }
            }
            Err(error @ Error::Limited(_)) => self.after.replies.push((entry.ticket, Err(error))),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Grants a waiter re-entry if its owner holds its names. Any other waiter stays in the queue.
    pub fn grant_reentry(&mut self, entry: &StoredWaiter) -> Result<()> {
        if let Admission::Reenter(_) = self.evaluate_request(&entry.request, Some(entry.ticket))? {
            self.try_grant(entry)?;
        }
        Ok(())
    }

    /// Whether a caller of this process still waits for the answer to a request.
    pub fn has_caller(&self, ticket: QueueTicket) -> bool {
        self.waiters.has_caller(ticket) || self.enqueued.contains(&ticket)
    }

    /// Grants re-entry to other waiters of an owner that has just been granted these names.
    fn grant_reentries_of(&mut self, owner: Owner, granted: &StoredWaiter) -> Result<()> {
        let names = granted.request.key.names.as_slice();
        for entry in self.all(statements::WAITERS_OF_OWNER, [owner.as_bytes()], StoredWaiter::read)? {
            let covered = entry.request.key.names.iter().all(|name| names.binary_search(name).is_ok());
            if !covered {
                continue;
            }
            let Admission::Reenter(fence) = self.evaluate_request(&entry.request, Some(entry.ticket))? else {
                continue;
            };
            if entry.peer != self.identity.peer {
                self.wake_peer(entry.peer, entry.ticket);
            } else if self.has_caller(entry.ticket) {
                self.remove_entry(&entry)?;
                let grant = self.insert_hold(&entry.request, fence)?;
                self.after.replies.push((entry.ticket, Ok(AcquireOutcome::Granted(grant))));
            } else {
                self.drop_entry(&entry)?;
            }
        }
        Ok(())
    }

    /// The conditions that this process watches for its first waiter in the queue of a name. Sets [`Tx::needs_write`] if the waiter can
    /// be served now.
    ///
    /// The head of the queue watches the processes of the holders. Every other waiter watches the process of the waiter
    /// just ahead, which may hold the lock by then. So the end of a process wakes one other process, not the whole queue.
    pub fn wake_conditions(&mut self, name: &LockName, ticket: QueueTicket) -> Result<WakeConditions> {
        let Some(entry) = self.entry(ticket)? else {
            self.needs_write = true;
            return Ok(WakeConditions::default());
        };
        let mut conditions = WakeConditions::default();
        if self.queue_head(name)?.is_some_and(|head| head < ticket) {
            let ahead = self.one(statements::AHEAD, params![name.as_str(), ticket], |row| row.get(0))?;
            let ahead = ahead.map(|ahead| self.entry(ahead)).transpose()?.flatten();
            self.watch_processes(&mut conditions, ahead.map(|ahead| ahead.process));
            return Ok(conditions);
        }
        let admission = self.evaluate_request(&entry.request, Some(ticket))?;
        self.needs_write |= !matches!(admission, Admission::Blocked | Admission::Upgrade);
        let holds = self.live(name)?;
        conditions.due = holds.iter().map(|hold| hold.expires).chain(self.delayed(name)?).min();
        let processes = holds.into_iter().filter(|hold| !hold.lingering).map(|hold| hold.process);
        self.watch_processes(&mut conditions, processes);
        Ok(conditions)
    }

    fn watch_processes(
        &mut self,
        conditions: &mut WakeConditions,
        processes: impl IntoIterator<Item = Process>,
    ) {
        for process in processes {
            self.needs_write |= self.liveness(&process) == Liveness::Gone;
            // The kernel reports the end only of processes in this pid namespace.
            if process != *self.identity.process && process.namespace == self.identity.process.namespace {
                conditions.processes.insert((process.pid, process.start, process.namespace));
            }
        }
    }
}
