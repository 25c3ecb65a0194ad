//! Standing in line: first come, first served, for every name of an ask.
//!
//! Nobody grants on behalf of another process. A lock that became free belongs to the first in line, whose process is
//! woken and takes it in a transaction of its own; everybody else sees the line and stands behind it.

use std::collections::BTreeSet;

use lockkeeper_core::rules::{Verdict, judge, judge_all};
use lockkeeper_core::{Acquired, Ask, Error, EventKind, LockName, Moment, Owner, Result, Wait};
use lockkeeper_host::{Life, Process};
use rusqlite::params;

use crate::fault::fault;
use crate::post::{Peer, Presence};
use crate::rows::{Hold, Ticket, Waiter, mode_number, moment, names_text, signed, span};
use crate::script;
use crate::tx::Tx;

/// A process to watch: its pid, its start, its namespace.
pub(crate) type Guard = (u32, u64, u64);

/// What a waiting process watches for one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outlook {
    /// The processes whose end would let us go on.
    pub guards: BTreeSet<Guard>,
    /// When a lease or a delay ends that would let us go on.
    pub due: Option<Moment>,
}

impl Tx<'_> {
    /// What the rule says about all names of an ask together. `place` is its ticket if it stands in line already.
    pub fn verdict(&mut self, ask: &Ask, place: Option<Ticket>) -> Result<Verdict> {
        let verdict = self.rule(ask, place);
        // The dead are looked for only when somebody is in the way.
        match verdict {
            Ok(Verdict::Free | Verdict::Reenter(_)) => verdict,
            _ if self.bury_holders(&ask.claim.names)? => self.rule(ask, place),
            _ => verdict,
        }
    }

    fn rule(&mut self, ask: &Ask, place: Option<Ticket>) -> Result<Verdict> {
        let each = ask.claim.names.iter().map(|name| {
            let verdict = judge(ask.owner, ask.mode, self.live(name)?.iter().map(Hold::stake));
            let ahead = |first| place.is_none_or(|place| first < place);
            let held_back = verdict == Verdict::Free
                && (self.delayed(name)?.is_some() || self.front(name)?.is_some_and(ahead));
            Ok(if held_back { Verdict::Blocked } else { verdict })
        });
        let verdict = judge_all(ask, place.is_some(), each)?;
        if let Verdict::Reenter(fence) = verdict {
            self.refuse_revoked(&ask.claim.names, fence)?;
        }
        Ok(verdict)
    }

    pub fn enqueue(&mut self, ask: &Ask) -> Result<(Ticket, Moment)> {
        if let Some(owner) = ask.owner {
            self.refuse_deadlock(owner, ask)?;
        }
        self.home.mailbox()?;
        let until = match ask.wait {
            Wait::No => self.now.moment,
            Wait::For(patience) => self.now.moment + patience,
            Wait::Forever => Moment::NEVER,
        };
        let ticket = self.next_ticket();
        let Ask { claim, owner, mode, ttl, lock_delay, min_hold, holder, .. } = ask;
        let process = &self.home.process;
        self.change(
            script::ADD_WAITER,
            params![
                ticket,
                claim.attempt.as_bytes(),
                self.home.peer,
                names_text(&claim.names),
                owner.map(|owner| *owner.as_bytes()),
                mode_number(*mode),
                moment(until),
                signed(self.now.wall.as_micros()),
                span(*ttl),
                span(*lock_delay),
                span(*min_hold),
                holder.host,
                holder.pid,
                holder.label,
                process.pid,
                signed(process.start),
                signed(process.namespace)
            ],
        )?;
        for name in &claim.names {
            let row = params![name.as_str(), ticket, self.home.peer, moment(until)];
            self.change(script::ADD_PLACE, row)?;
        }
        self.tell(claim.names.as_slice(), &EventKind::Waiting, Some(holder))?;
        self.lengths.clear();
        self.joined.insert(ticket);
        Ok((ticket, until))
    }

    /// An ask that stands in line already is asked again, perhaps by another process: its place is ours now.
    pub fn take_over(&mut self, ticket: Ticket) -> Result<Moment> {
        let Some(waiter) = self.waiter(ticket)? else { return Ok(self.now.moment) };
        if waiter.peer == self.home.peer {
            return Ok(waiter.until);
        }
        self.home.mailbox()?;
        let (peer, process) = (self.home.peer, &self.home.process);
        let row = params![ticket, peer, process.pid, signed(process.start), signed(process.namespace)];
        self.change(script::MOVE_WAITER, row)?;
        for name in &waiter.ask.claim.names {
            self.change(script::MOVE_PLACE, params![name.as_str(), ticket, peer])?;
        }
        self.nudge(waiter.peer, ticket);
        self.joined.insert(ticket);
        Ok(waiter.until)
    }

    pub fn waiter(&self, ticket: Ticket) -> Result<Option<Waiter>> {
        self.one(script::WAITER, [ticket], Waiter::read)
    }

    /// Counted once for each transaction: a crowd that gives up together would else be counted again for each.
    pub fn line_length(&mut self, name: &LockName) -> Result<usize> {
        if let Some(length) = self.lengths.get(name) {
            return Ok(*length);
        }
        let length = self.one(script::LINE_LENGTH, [name.as_str()], |row| row.get::<_, u32>(0))?;
        let length = length.unwrap_or(0) as usize;
        self.lengths.insert(name.clone(), length);
        Ok(length)
    }

    /// The first in line that can be served. Passed over: who is silent (it keeps its place), who is gone (it loses it),
    /// a queue entry of our own that nobody waits for (it is removed), and whose patience is over (its own process sees
    /// to it).
    pub fn front(&mut self, name: &LockName) -> Result<Option<Ticket>> {
        let (mut gone, mut orphans) = (Vec::new(), Vec::new());
        let first = {
            let sql = self.sql;
            let mut line = sql.prepare_cached(script::LINE).map_err(fault)?;
            let mut line = line.query([name.as_str()]).map_err(fault)?;
            let now = moment(self.now.moment);
            loop {
                let Some(row) = line.next().map_err(fault)? else { break None };
                let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
                let (ticket, peer, until): (Ticket, Peer, i64) = read(row).map_err(fault)?;
                match self.presence(&peer) {
                    Presence::Here if peer == self.home.peer && !self.wanted(ticket) => orphans.push(ticket),
                    Presence::Here if until >= now || peer == self.home.peer => break Some(ticket),
                    Presence::Here | Presence::Silent => {}
                    Presence::Gone if gone.contains(&peer) => {}
                    Presence::Gone => gone.push(peer),
                }
            }
        };
        for peer in gone {
            self.bury_peer(&peer)?;
        }
        for ticket in orphans {
            self.remove_orphan(ticket)?;
        }
        Ok(first)
    }

    /// A store that is gone leaves all its lines and watches no more.
    pub fn bury_peer(&mut self, peer: &Peer) -> Result<()> {
        self.due = true;
        if !self.writes {
            return Ok(());
        }
        for waiter in self.all(script::WAITERS_OF_PEER, [peer], Waiter::read)? {
            self.drop_waiter(&waiter)?;
        }
        self.change(script::REMOVE_WATCHER, [peer])?;
        self.home.post.sweep(peer);
        Ok(())
    }

    /// A queue entry of this process that nobody waits for would hold up everybody behind it.
    pub fn remove_orphan(&mut self, ticket: Ticket) -> Result<()> {
        self.due = true;
        match self.waiter(ticket)?.filter(|_| self.writes) {
            Some(waiter) => self.drop_waiter(&waiter),
            None => Ok(()),
        }
    }

    fn remove_waiter(&mut self, waiter: &Waiter) -> Result<()> {
        self.change(script::REMOVE_WAITER, [waiter.ticket])?;
        for name in &waiter.ask.claim.names {
            self.change(script::REMOVE_PLACE, params![name.as_str(), waiter.ticket])?;
            if let Some(length) = self.lengths.get_mut(name) {
                *length = length.saturating_sub(1);
            }
        }
        self.touch(&waiter.ask.claim.names);
        Ok(())
    }

    pub fn drop_waiter(&mut self, waiter: &Waiter) -> Result<()> {
        self.remove_waiter(waiter)?;
        self.tell(waiter.ask.claim.names.as_slice(), &EventKind::Left, Some(&waiter.ask.holder))
    }

    /// Takes an ask out of the line because it was withdrawn; its own process is told if it is another one.
    pub fn leave(&mut self, ticket: Ticket) -> Result<()> {
        let Some(waiter) = self.waiter(ticket)? else { return Ok(()) };
        self.drop_waiter(&waiter)?;
        if waiter.peer != self.home.peer {
            self.nudge(waiter.peer, ticket);
        }
        Ok(())
    }

    /// Takes asks out of the line whose patience is over, unless they can be served at this last moment.
    pub fn give_up(&mut self, tickets: &[Ticket]) -> Result<()> {
        for ticket in tickets {
            let Some(waiter) = self.waiter(*ticket)? else { continue };
            if waiter.peer == self.home.peer && !self.serve_one(&waiter)? {
                self.drop_waiter(&waiter)?;
                let busy = self.busy(&waiter.ask, *ticket)?;
                self.after.answers.push((*ticket, Ok(Acquired::Busy(busy))));
                self.serve()?;
            }
        }
        Ok(())
    }

    /// Serves the lines of all touched names, whoever came first first, until nobody at a front can be served: ours are
    /// served here, others are woken.
    pub fn serve(&mut self) -> Result<()> {
        let mut fronts = BTreeSet::new();
        loop {
            while let Some(name) = self.touched.pop_first() {
                fronts.extend(self.front(&name)?);
            }
            let Some(first) = fronts.pop_first() else { return Ok(()) };
            if let Some(waiter) = self.waiter(first)? {
                self.serve_one(&waiter)?;
            }
        }
    }

    /// Whether it left the line.
    pub fn serve_one(&mut self, waiter: &Waiter) -> Result<bool> {
        let mine = waiter.peer == self.home.peer;
        if mine && !self.wanted(waiter.ticket) {
            self.drop_waiter(waiter)?;
            return Ok(true);
        }
        let verdict = self.verdict(&waiter.ask, Some(waiter.ticket))?;
        if matches!(verdict, Verdict::Blocked | Verdict::Upgrade) {
            return Ok(false);
        }
        if !mine {
            self.nudge(waiter.peer, waiter.ticket);
            return Ok(false);
        }
        let fence = match verdict {
            Verdict::Reenter(fence) => Ok(fence),
            _ => self.next_fence(),
        };
        self.remove_waiter(waiter)?;
        match fence {
            Ok(fence) => {
                let grant = self.admit(&waiter.ask, fence)?;
                self.after.answers.push((waiter.ticket, Ok(Acquired::Granted(grant))));
                if let Some(owner) = waiter.ask.owner {
                    self.serve_owner(owner, waiter)?;
                }
            }
            Err(error @ Error::Limited(_)) => self.after.answers.push((waiter.ticket, Err(error))),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Serves an ask whose owner has its names already; any other waits for its turn.
    pub fn serve_past_the_line(&mut self, waiter: &Waiter) -> Result<()> {
        if let Verdict::Reenter(_) = self.verdict(&waiter.ask, Some(waiter.ticket))? {
            self.serve_one(waiter)?;
        }
        Ok(())
    }

    /// Whether somebody of this process still waits for the answer.
    pub fn wanted(&self, ticket: Ticket) -> bool {
        self.locals.wants(ticket) || self.joined.contains(&ticket)
    }

    /// Other asks of an owner that just got these names re-enter past the line.
    fn serve_owner(&mut self, owner: Owner, served: &Waiter) -> Result<()> {
        let names = served.ask.claim.names.as_slice();
        for waiter in self.all(script::WAITERS_OF_OWNER, [owner.as_bytes()], Waiter::read)? {
            let covered = waiter.ask.claim.names.iter().all(|name| names.binary_search(name).is_ok());
            if !covered {
                continue;
            }
            let Verdict::Reenter(fence) = self.verdict(&waiter.ask, Some(waiter.ticket))? else { continue };
            if waiter.peer != self.home.peer {
                self.nudge(waiter.peer, waiter.ticket);
            } else if self.wanted(waiter.ticket) {
                self.remove_waiter(&waiter)?;
                let grant = self.admit(&waiter.ask, fence)?;
                self.after.answers.push((waiter.ticket, Ok(Acquired::Granted(grant))));
            } else {
                self.drop_waiter(&waiter)?;
            }
        }
        Ok(())
    }

    /// What our first waiter in the line of a name has to watch. Sets [`Tx::due`] if there is something to do at once.
    ///
    /// The first in line watches the holders. Everybody else watches the one before it, which may hold by now: so the
    /// death of a process wakes one other process and not the whole line.
    pub fn outlook(&mut self, name: &LockName, ticket: Ticket) -> Result<Outlook> {
        let Some(waiter) = self.waiter(ticket)? else {
            self.due = true;
            return Ok(Outlook::default());
        };
        let mut outlook = Outlook::default();
        if self.front(name)?.is_some_and(|first| first < ticket) {
            let before = self.one(script::AHEAD, params![name.as_str(), ticket], |row| row.get(0))?;
            let before = before.map(|before| self.waiter(before)).transpose()?.flatten();
            self.guard(&mut outlook, before.map(|before| before.process));
            return Ok(outlook);
        }
        self.due |= !matches!(self.verdict(&waiter.ask, Some(ticket))?, Verdict::Blocked | Verdict::Upgrade);
        let holds = self.live(name)?;
        outlook.due = holds.iter().map(|hold| hold.expires).chain(self.delayed(name)?).min();
        self.guard(&mut outlook, holds.into_iter().filter(|hold| !hold.lingering).map(|hold| hold.process));
        Ok(outlook)
    }

    fn guard(&mut self, outlook: &mut Outlook, processes: impl IntoIterator<Item = Process>) {
        for process in processes {
            self.due |= self.life(&process) == Life::Gone;
            // Who cannot be seen from here cannot be watched either.
            if process != *self.home.process && process.namespace == self.home.process.namespace {
                outlook.guards.insert((process.pid, process.start, process.namespace));
            }
        }
    }
}
