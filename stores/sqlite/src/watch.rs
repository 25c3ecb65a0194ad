//! Looking after those of this process who wait or watch.

use lockkeeper_core::{Error, LockName, Moment, Wait};

use crate::batch::Request;
use crate::locals::Local;
use crate::rows::Ticket;
use crate::script;
use crate::waker::Wake;
use crate::worker::Worker;

/// How many names or requests are looked at before others get their turn.
const SLICE: usize = 64;

impl Worker {
    /// These requests of ours wait in a queue now.
    pub fn wait(&mut self, tickets: &[Ticket]) {
        if tickets.is_empty() {
            return;
        }
        if let Err(error) = self.start_waker() {
            for ticket in tickets {
                let Some(local) = self.locals.remove(*ticket) else { continue };
                self.withdraw_later(local.ask.claim);
                let _ = local.tell.send(Err(error.clone()));
            }
            return self.rearm();
        }
        let mut names = Vec::new();
        for ticket in tickets {
            // Only the first of ours in a queue watches for it.
            let of_it = self.locals.names_of(*ticket);
            names.extend(of_it.into_iter().filter(|name| self.locals.first(name) == Some(*ticket)));
        }
        if self.refresh(&names) || self.locals.next_due().is_some_and(|due| due <= self.now()) {
            self.ring();
        }
        self.rearm();
    }

    /// The waker says that something happened.
    pub fn wake(&mut self, wake: &Wake) {
        if wake.poll {
            self.show_up();
        }
        self.look(&wake.tickets, wake.all);
    }

    /// Comes back if somebody cleaned our pipe away.
    fn show_up(&mut self) {
        if self.home().mailbox.get().is_none_or(|mailbox| mailbox.in_place()) {
            return;
        }
        let old = self.home().peer;
        tracing::warn!("the pipe that wakes this process is gone: making another");
        self.move_house();
        let _ = self.write(false, |tx| tx.bury_peer(&old));
        if self.watchers.feed.any() {
            self.watchers.feed.miss();
            let _ = self.write(false, |tx| tx.start_watching());
            let _ = self.start_waker();
        }
    }

    /// Does what is due for our waiters: for these asks, for lines in which a lease ended, for those without patience;
    /// and for every line if `all`.
    pub fn look(&mut self, tickets: &[Ticket], all: bool) {
        let now = self.now();
        self.looked = now;
        if all {
            self.looking = self.locals.names().collect();
            self.locals.watch_guards_again();
        }
        let overdue = self.locals.overdue(now, SLICE);
        if overdue.len() == SLICE {
            self.ring();
        }
        let mut names = self.locals.due(now);
        self.looking.extend(names.drain(names.len().min(SLICE)..));
        for ticket in tickets.iter().chain(&overdue) {
            names.extend(self.locals.names_of(*ticket));
        }
        names.sort();
        names.dedup();
        // Most of the time there is nothing to do (the lease was renewed meanwhile), and then nothing is written.
        if (tickets.is_empty() && overdue.is_empty()) || self.serve_now(tickets, &names, &overdue) {
            self.attend(&names);
        }
        self.look_at_events(all);
        self.rearm();
    }

    /// Looks at some of the names that are to be looked at.
    pub fn look_further(&mut self) {
        if self.looking.is_empty() {
            return;
        }
        let some = self.looking.len().min(SLICE);
        let mut names: Vec<LockName> = self.looking.drain(..some).collect();
        names.sort();
        self.attend(&names);
        self.rearm();
    }

    /// Finds out what to watch for these names, and serves whoever can be served.
    fn attend(&mut self, names: &[LockName]) {
        for _ in 0..3 {
            self.stale.retain(|name| names.binary_search(name).is_err());
            if !self.refresh(names) || !self.serve_now(&[], names, &[]) {
                return;
            }
        }
    }

    /// After a job of our own that changed who holds what we wait for.
    pub fn catch_up(&mut self) {
        if self.stale.is_empty() {
            return;
        }
        let names: Vec<LockName> = std::mem::take(&mut self.stale).into_iter().collect();
        self.attend(&names);
        self.rearm();
    }

    /// Whether the store let us.
    fn serve_now(&mut self, tickets: &[Ticket], names: &[LockName], overdue: &[Ticket]) -> bool {
        let served = self.write(true, |tx| {
            let peer = tx.home.peer;
            for ticket in tickets {
                let waiter = tx.waiter(*ticket)?;
                if waiter.is_some_and(|waiter| waiter.peer == peer) && !tx.wanted(*ticket) {
                    tx.remove_orphan(*ticket)?;
                }
            }
            let again = tx.all(script::REENTRANT, [peer], |row| row.get::<_, Ticket>(0))?;
            for ticket in tickets.iter().chain(&again) {
                if let Some(waiter) = tx.waiter(*ticket)?.filter(|waiter| waiter.peer == peer) {
                    tx.serve_past_the_line(&waiter)?;
                }
            }
            tx.touch(names);
            tx.serve()?;
            tx.give_up(overdue)?;
            // Those of ours that are not in line any more were withdrawn elsewhere.
            let mut lost = Vec::new();
            let firsts = names.iter().filter_map(|name| tx.locals.first(name));
            for ticket in tickets.iter().copied().chain(firsts) {
                let answered = tx.after.answers.iter().any(|(other, _)| *other == ticket);
                if tx.locals.has(ticket)
                    && !answered
                    && tx.waiter(ticket)?.is_none_or(|waiter| waiter.peer != peer)
                {
                    lost.push(ticket);
                }
            }
            Ok(lost)
        });
        match served {
            Ok(lost) => {
                for local in lost.into_iter().filter_map(|ticket| self.locals.remove(ticket)) {
                    let _ = local.tell.send(Err(Error::Unknown("the ask left the line".into())));
                }
                true
            }
            Err(error) => {
                tracing::warn!(%error, "those in line could not be served: trying again soon");
                for ticket in overdue {
                    let Some(local) = self.locals.remove(*ticket) else { continue };
                    self.withdraw_later(local.ask.claim);
                    let text = format!("its patience is over, but it could not leave the line: {error}");
                    let _ = local.tell.send(Err(Error::Unknown(text)));
                }
                false
            }
        }
    }

    /// Finds out what to watch for these names; says whether there is something to do at once.
    fn refresh(&mut self, names: &[LockName]) -> bool {
        let firsts: Vec<(LockName, Ticket)> =
            names.iter().filter_map(|name| Some((name.clone(), self.locals.first(name)?))).collect();
        if firsts.is_empty() {
            return false;
        }
        let looked = self.read(|tx| {
            let look = |(name, ticket)| tx.outlook(&name, ticket).map(|outlook| (name, outlook));
            firsts.into_iter().map(look).collect::<Result<Vec<_>, _>>()
        });
        let Ok((outlooks, due)) = looked else { return false };
        for (name, outlook) in outlooks {
            self.locals.set_outlook(&name, outlook);
        }
        due
    }

    fn look_at_events(&mut self, poll: bool) {
        if !self.watchers.feed.any() {
            return;
        }
        self.watchers.feed.tidy();
        if !self.watchers.feed.any() {
            let _ = self.write(false, |tx| tx.change(script::REMOVE_WATCHER, [tx.home.peer]));
            return;
        }
        // Nobody asks for a lock that is left to expire, but those who watch want to know.
        let now = self.now();
        let next = self.next_expiry();
        if next.is_some_and(|next| next <= now) && self.write(false, |tx| tx.tidy()).is_ok() {
            // Perhaps there is more; others get their turn in between.
            self.ring();
        }
        if poll {
            let _ = self.write_if_unwatched();
        }
        self.pass_on_events();
    }

    /// Somebody may have taken us for dead while we were stopped.
    fn write_if_unwatched(&mut self) -> lockkeeper_core::Result<()> {
        let peer = self.home().peer;
        let (known, _) = self.read(|tx| tx.one(script::IS_WATCHER, [peer], |_| Ok(())))?;
        if known.is_none() {
            self.write(false, |tx| tx.start_watching().map(drop))?;
        }
        Ok(())
    }

    pub fn pass_on_events(&mut self) {
        loop {
            let cursor = self.watchers.cursor;
            let Ok(((missed, events), _)) = self.read(|tx| tx.events_after(cursor)) else { return };
            if missed {
                self.watchers.feed.miss();
            }
            let full = events.len() >= 1000;
            for (number, event) in events {
                self.watchers.feed.tell(&event);
                self.watchers.cursor = number;
            }
            if !full {
                return;
            }
        }
    }

    fn next_expiry(&mut self) -> Option<Moment> {
        let read = self.read(|tx| tx.one(script::NEXT_EXPIRY, [], |row| row.get::<_, Option<i64>>(0)));
        let next = read.ok()?.0.flatten()?;
        Some(Moment::from_nanos(next.unsigned_abs()))
    }

    /// Sets the alarm and the list of processes to watch.
    pub fn rearm(&mut self) {
        let now = self.now();
        let expiry = if self.watchers.feed.any() { self.next_expiry() } else { None };
        let next = [self.locals.next_due(), expiry, self.withdraw_at()].into_iter().flatten().min();
        // What came due while we looked is looked at again. What was due already and could not be done waits for the
        // poll.
        if next.is_some_and(|next| next <= now && next > self.looked) {
            self.ring();
        }
        self.set_alarm(next.filter(|next| *next > now));
        self.set_guards();
    }

    /// Asks whose place is gone with the file stand in the line of the new one, in the same order.
    pub fn stand_again(&mut self) {
        let now = self.now();
        let mut again = Vec::new();
        for Local { mut ask, until, tell } in self.take_strays() {
            ask.wait = if until == Moment::NEVER { Wait::Forever } else { Wait::For(until.since(now)) };
            again.push(Request::Acquire { ask, tell });
        }
        self.run_batch(again);
        if self.watchers.feed.any() {
            let _ = self.write(false, |tx| tx.start_watching());
            let _ = self.start_waker();
        }
    }
}
