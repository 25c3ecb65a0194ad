//! How the worker serves the waiters of this process: it finds out what to watch for them, and grants them their locks.

use lockkeeper_core::{BootInstant, Error, LockName, Wait};

use crate::codec::QueueTicket;
use crate::requests::WriteRequest;
use crate::statements;
use crate::waiters::LocalWaiter;
use crate::wake_thread::WakeReport;
use crate::worker::Worker;

/// How many names or requests the worker checks before it runs other requests.
const SLICE: usize = 64;

impl Worker {
    /// Starts to watch for requests of this process that have joined the queue.
    pub fn watch_for(&mut self, tickets: &[QueueTicket]) {
        if tickets.is_empty() {
            return;
        }
        if let Err(error) = self.start_wake_thread() {
            for ticket in tickets {
                let Some(waiter) = self.waiters.remove(*ticket) else { continue };
                self.withdraw_later(waiter.request.key);
                let _ = waiter.reply.send(Err(error.clone()));
            }
            return self.rearm();
        }
        let mut names = Vec::new();
        for ticket in tickets {
            // The first waiter of this process in a queue watches for all of them.
            let of_ticket = self.waiters.names_of(*ticket);
            names.extend(of_ticket.into_iter().filter(|name| self.waiters.first(name) == Some(*ticket)));
        }
        if self.refresh_conditions(&names) || self.waiters.next_due().is_some_and(|due| due <= self.now()) {
            self.wake_self();
        }
        self.rearm();
    }

    /// Handles a report of the wake thread.
    pub fn handle_wake(&mut self, report: &WakeReport) {
        if report.poll {
            self.restore_pipe();
        }
        self.check_waiters(&report.tickets, report.all);
    }

    /// Creates another pipe if another program has deleted the pipe of this store.
    fn restore_pipe(&mut self) {
        if !self.has_lost_pipe() {
            return;
        }
        let old = self.peer();
        tracing::warn!("the pipe that wakes this process was deleted: creating another");
        self.recreate_pipe();
        let _ = self.write(|tx| tx.remove_dead_peer(&old));
        if self.watchers.hub.any() {
            self.watchers.hub.miss();
            let _ = self.write(|tx| tx.start_watching());
            let _ = self.start_wake_thread();
        }
    }

    /// Serves the waiters that can be served: those with these tickets, those for whose names a lease has ended, and those
    /// whose time is over. With `all`, the worker checks every name with waiters.
    pub fn check_waiters(&mut self, tickets: &[QueueTicket], all: bool) {
        let now = self.now();
        self.last_check = now;
        if all {
            self.names_to_check = self.waiters.names().collect();
            self.waiters.watch_processes_again();
        }
        let overdue = self.waiters.overdue(now, SLICE);
        if overdue.len() == SLICE {
            self.wake_self();
        }
        let mut names = self.waiters.due(now);
        self.names_to_check.extend(names.drain(names.len().min(SLICE)..));
        for ticket in tickets.iter().chain(&overdue) {
            names.extend(self.waiters.names_of(*ticket));
        }
        names.sort();
        names.dedup();
        // Usually the holder has renewed its lease. A reading transaction finds that out, and nothing is written.
        if (tickets.is_empty() && overdue.is_empty()) || self.serve_waiters(tickets, &names, &overdue) {
            self.refresh_and_serve(&names);
        }
        self.poll_events(all);
        self.rearm();
    }

    /// Checks some of the names that are left to check.
    pub fn check_some_names(&mut self) {
        if self.names_to_check.is_empty() {
            return;
        }
        let some = self.names_to_check.len().min(SLICE);
        let mut names: Vec<LockName> = self.names_to_check.drain(..some).collect();
        names.sort();
        self.refresh_and_serve(&names);
        self.rearm();
    }

    /// Finds out what to watch for these names, and serves the waiters that can be served now.
    fn refresh_and_serve(&mut self, names: &[LockName]) {
        for _ in 0..3 {
            self.stale_names.retain(|name| names.binary_search(name).is_err());
            if !self.refresh_conditions(names) || !self.serve_waiters(&[], names, &[]) {
                return;
            }
        }
    }

    /// Finds out what to watch for the names whose holders this process has changed.
    pub fn refresh_stale(&mut self) {
        if self.stale_names.is_empty() {
            return;
        }
        let names: Vec<LockName> = std::mem::take(&mut self.stale_names).into_iter().collect();
        self.refresh_and_serve(&names);
        self.rearm();
    }

    /// Serves waiters in a transaction. Returns whether the transaction was committed.
    fn serve_waiters(
        &mut self,
        tickets: &[QueueTicket],
        names: &[LockName],
        overdue: &[QueueTicket],
    ) -> bool {
        let served = self.write(|tx| {
            let peer = tx.identity.peer;
            for ticket in tickets {
                let entry = tx.entry(*ticket)?;
                if entry.is_some_and(|entry| entry.peer == peer) && !tx.has_caller(*ticket) {
                    tx.remove_abandoned_entry(*ticket)?;
                }
            }
            let reentrant = tx.all(statements::REENTRANT, [peer], |row| row.get::<_, QueueTicket>(0))?;
            for ticket in tickets.iter().chain(&reentrant) {
                if let Some(entry) = tx.entry(*ticket)?.filter(|entry| entry.peer == peer) {
                    tx.grant_reentry(&entry)?;
                }
            }
            tx.mark_changed(names);
            tx.grant_waiters()?;
            tx.time_out(overdue)?;
            // A waiter of this process without a queue entry was withdrawn by another process.
            let mut lost = Vec::new();
            let firsts = names.iter().filter_map(|name| tx.waiters.first(name));
            for ticket in tickets.iter().copied().chain(firsts) {
                let answered = tx.after.replies.iter().any(|(other, _)| *other == ticket);
                if tx.waiters.has(ticket)
                    && !answered
                    && tx.entry(ticket)?.is_none_or(|entry| entry.peer != peer)
                {
                    lost.push(ticket);
                }
            }
            Ok(lost)
        });
        match served {
            Ok(lost) => {
                for waiter in lost.into_iter().filter_map(|ticket| self.waiters.remove(ticket)) {
                    let _ = waiter.reply.send(Err(left_queue()));
                }
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the waiters of this process could not be served: trying again within seconds");
                for ticket in overdue {
                    let Some(waiter) = self.waiters.remove(*ticket) else { continue };
                    self.withdraw_later(waiter.request.key);
                    let text =
                        format!("the wait is over, but the request could not leave the queue: {error}");
                    let _ = waiter.reply.send(Err(Error::Unknown(text)));
                }
                false
            }
        }
    }

    /// Finds out what to watch for these names. Returns whether a waiter can be served now.
    fn refresh_conditions(&mut self, names: &[LockName]) -> bool {
        let firsts: Vec<(LockName, QueueTicket)> =
            names.iter().filter_map(|name| Some((name.clone(), self.waiters.first(name)?))).collect();
        if firsts.is_empty() {
            return false;
        }
        let found = self.read(|tx| {
            let conditions =
                |(name, ticket)| tx.wake_conditions(&name, ticket).map(|conditions| (name, conditions));
            firsts.into_iter().map(conditions).collect::<Result<Vec<_>, _>>()
        });
        let Ok((found, needs_write)) = found else { return false };
        for (name, conditions) in found {
            self.waiters.set_wake_conditions(&name, conditions);
        }
        needs_write
    }

    /// Sets the timer and the processes to watch.
    pub fn rearm(&mut self) {
        let now = self.now();
        let expiry = if self.watchers.hub.any() { self.next_expiry() } else { None };
        let next = [self.waiters.next_due(), expiry, self.withdraw_at()].into_iter().flatten().min();
        // An end that came during the last check is checked again at once. An end from before that check could not be
        // handled, and waits for the poll.
        if next.is_some_and(|next| next <= now && next > self.last_check) {
            self.wake_self();
        }
        self.set_timer(next.filter(|next| *next > now));
        self.update_watched_processes();
    }

    /// Puts waiters whose queue entries are gone with a file into the queue of the new one, in the same order.
    pub fn enqueue_displaced(&mut self) {
        let now = self.now();
        let mut requests = Vec::new();
        for LocalWaiter { mut request, until, reply } in std::mem::take(&mut self.displaced) {
            request.wait =
                if until == BootInstant::NEVER { Wait::Forever } else { Wait::For(until.since(now)) };
            requests.push(WriteRequest::Acquire { request, reply });
        }
        self.run_batch(requests);
        if self.watchers.hub.any() {
            let _ = self.write(|tx| tx.start_watching());
            let _ = self.start_wake_thread();
        }
    }
}

/// The error of a request that another caller has withdrawn or sent again.
pub(crate) fn left_queue() -> Error {
    Error::Unknown("the request left the queue".into())
}
