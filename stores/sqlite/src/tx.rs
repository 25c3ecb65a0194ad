//! One transaction: what time it is in it, the row of state, the fences, and what is left to do after the commit.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::table::Now;
use lockkeeper_core::{Acquired, Error, Fence, LockName, Moment, Result};
use lockkeeper_host::{Life, Process};
use rusqlite::{Connection, params};

use crate::fault::{damaged, fault};
use crate::floor::{Floor, Marks};
use crate::locals::Locals;
use crate::post::{Mailbox, Peer, Post, Presence};
use crate::rows::{self, Ticket, moment, signed};
use crate::script;

/// What an open store is to the others.
#[derive(Debug)]
pub(crate) struct Home {
    pub peer: Peer,
    pub process: &'static Process,
    /// `None`: this container masks the identity of the boot.
    pub boot: Option<String>,
    pub floor: Floor,
    pub post: Post,
    /// Made when the store first waits or watches.
    pub mailbox: OnceCell<Arc<Mailbox>>,
}

impl Home {
    /// The pipe exists before the row that promises it: a row whose pipe is missing is taken for a dead one.
    pub fn mailbox(&self) -> Result<Arc<Mailbox>> {
        if let Some(mailbox) = self.mailbox.get() {
            // It may have been idle for long.
            mailbox.touch();
            return Ok(mailbox.clone());
        }
        self.post.sweep_old();
        let mailbox = Arc::new(Mailbox::open(&self.post, &self.peer)?);
        Ok(self.mailbox.get_or_init(|| mailbox).clone())
    }
}

/// The row of state: one counter for all fences and versions, which outlives every lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The boot in which it was written last; empty if its writer could not tell.
    boot: String,
    fence: u64,
    reserved: u64,
    ticket: Ticket,
    /// When it was written last, give or take [`PRECISION`].
    moment: Moment,
}

/// How exactly the state says when it was written.
const PRECISION: Duration = Duration::from_secs(1);

impl State {
    /// Reads it, and whether somebody watches.
    pub fn read(sql: &Connection) -> Result<(State, bool)> {
        let read = |row: &rusqlite::Row<'_>| {
            let number = |at| row.get::<_, i64>(at).map(i64::unsigned_abs);
            let moment = Moment::from_nanos(number(4)?);
            let (fence, reserved) = (number(1)?, number(2)?);
            let state = State { boot: row.get(0)?, fence, reserved, ticket: row.get(3)?, moment };
            Ok((state, row.get(5)?))
        };
        let found = rows::one(sql, script::STATE, [], read).map_err(fault)?;
        found.ok_or_else(|| damaged("the missing row of state"))
    }

    /// Whether another boot of the machine wrote it. Where the identity of the boot is masked, only a clock that stands
    /// before the last write proves that: a wrong guess would be a second holder. Without the proof, what another boot
    /// left behind ends with its ttl, which is counted on from the last write.
    pub fn is_of_another_boot(&self, boot: Option<&str>, now: Moment) -> bool {
        match boot {
            Some(boot) if !self.boot.is_empty() => boot != self.boot,
            _ => now + PRECISION < self.moment,
        }
    }
}

/// What is to be done once the commit stands.
#[derive(Debug, Default)]
pub(crate) struct After {
    pub answers: Vec<(Ticket, Result<Acquired>)>,
    pub nudges: BTreeMap<Peer, BTreeSet<u64>>,
    pub events: bool,
    /// It is told to somebody only when it is on the disk.
    pub durable: bool,
    /// Names that are held otherwise than before: whoever waits for them has something else to watch.
    pub changed: BTreeSet<LockName>,
}

pub(crate) struct Tx<'e> {
    pub sql: &'e Connection,
    pub home: &'e Home,
    pub locals: &'e Locals,
    pub writes: bool,
    /// Before the transaction began: a lease counts from here.
    pub sent: Moment,
    /// After it began, so that what was decided just before is seen in the past.
    pub now: Now,
    pub after: After,
    /// Somebody watches.
    pub watched: bool,
    /// A reader found something that only a writer can mend.
    pub due: bool,
    /// Requests that joined a queue in this transaction: this process does not know of them yet.
    pub joined: BTreeSet<Ticket>,
    /// Names whose lines may have somebody to serve now.
    pub touched: BTreeSet<LockName>,
    /// How many wait for a name.
    pub lengths: HashMap<LockName, usize>,
    state: State,
    stored: State,
    /// What another boot left behind was dropped in this transaction.
    new_boot: bool,
    /// What the floor says, read once by a transaction that needs fences.
    floor: Option<Marks>,
    lives: HashMap<Process, Life>,
    presences: HashMap<Peer, Presence>,
}

impl<'e> Tx<'e> {
    pub fn new(
        sql: &'e Connection,
        home: &'e Home,
        locals: &'e Locals,
        writes: bool,
        sent: Moment,
        now: Now,
    ) -> Self {
        Tx {
            sql,
            home,
            locals,
            writes,
            sent,
            now,
            after: After::default(),
            watched: false,
            due: false,
            joined: BTreeSet::new(),
            lengths: HashMap::new(),
            touched: BTreeSet::new(),
            state: State::default(),
            stored: State::default(),
            new_boot: false,
            floor: None,
            lives: HashMap::new(),
            presences: HashMap::new(),
        }
    }

    /// Reads the row of state; what another boot of the machine left behind is dropped.
    pub fn load(&mut self) -> Result<()> {
        (self.stored, self.watched) = State::read(self.sql)?;
        self.state = self.stored.clone();
        self.state.boot = self.home.boot.clone().unwrap_or_default();
        if self.stored.is_of_another_boot(self.home.boot.as_deref(), self.now.moment) {
            self.forget_other_boot().map_err(fault)?;
        }
        Ok(())
    }

    fn forget_other_boot(&mut self) -> rusqlite::Result<()> {
        for text in script::NEW_BOOT {
            script::run(self.sql, text)?;
        }
        script::change(self.sql, script::NEW_BOOT_RECORDS, [moment(self.now.moment)])?;
        self.state.moment = Moment::default();
        (self.watched, self.new_boot) = (false, true);
        Ok(())
    }

    /// Writes the row of state if it changed, or is too old to say when anything was written.
    pub fn save(&self) -> Result<()> {
        let now = self.now.moment;
        if self.state == self.stored && now < self.stored.moment + PRECISION {
            return Ok(());
        }
        let State { boot, fence, reserved, ticket, moment: last } = &self.state;
        assert!(*fence >= self.stored.fence, "fences only grow");
        if self.floor.is_some() {
            self.home.floor.note(Fence::new(*fence)?)?;
        }
        let params = params![boot, signed(*fence), signed(*reserved), ticket, moment(now.max(*last))];
        script::change(self.sql, script::SAVE_STATE, params).map_err(fault)?;
        Ok(())
    }

    /// A number greater than every fence and version so far, whatever became of the file or the wall clock.
    pub fn next_fence(&mut self) -> Result<Fence> {
        let mut last = self.state.fence;
        let floor = match self.floor {
            // The write lock keeps every other process from changing it.
            Some(floor) => floor,
            None => {
                let floor = self.home.floor.read()?;
                last = last.max(floor.latest);
                // The file does not know of a number that was reserved: it is new, or an old copy. Or the machine has
                // been restarted, and the newest fence, which is not synced, may be forgotten.
                if floor.reserved > self.state.reserved || self.new_boot {
                    last = last.max(floor.reserved);
                }
                *self.floor.insert(floor)
            }
        };
        let last = (last > 0).then(|| Fence::new(last)).transpose()?;
        let fence = Fence::after(last, self.now.wall)?;
        if fence.get() > self.state.reserved || floor.reserved < self.state.reserved {
            self.state.reserved = self.home.floor.reserve(fence, self.now.wall)?;
            self.floor = Some(Marks { reserved: self.state.reserved, ..floor });
        }
        self.state.fence = fence.get();
        Ok(fence)
    }

    pub fn next_ticket(&mut self) -> Ticket {
        self.state.ticket += 1;
        self.state.ticket
    }

    /// Whether a process still runs, looked up once for each transaction.
    pub fn life(&mut self, process: &Process) -> Life {
        if process == self.home.process {
            return Life::Alive;
        }
        *self.lives.entry(process.clone()).or_insert_with_key(Process::life)
    }

    /// How a peer is, looked up once for each transaction.
    pub fn presence(&mut self, peer: &Peer) -> Presence {
        if *peer == self.home.peer {
            return Presence::Here;
        }
        *self.presences.entry(*peer).or_insert_with(|| self.home.post.presence(peer))
    }

    pub fn nudge(&mut self, peer: Peer, ticket: Ticket) {
        self.after.nudges.entry(peer).or_default().insert(ticket.unsigned_abs());
    }

    pub fn touch<'n>(&mut self, names: impl IntoIterator<Item = &'n LockName>) {
        for name in names {
            self.touched.insert(name.clone());
            self.after.changed.insert(name.clone());
        }
    }

    pub fn change(&self, text: &str, params: impl rusqlite::Params) -> Result<usize> {
        debug_assert!(self.writes, "a reader changes nothing");
        script::change(self.sql, text, params).map_err(fault)
    }

    pub fn one<T>(
        &self,
        text: &str,
        params: impl rusqlite::Params,
        read: impl FnOnce(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>> {
        rows::one(self.sql, text, params, read).map_err(fault)
    }

    pub fn all<T>(
        &self,
        text: &str,
        params: impl rusqlite::Params,
        read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>> {
        rows::all(self.sql, text, params, read).map_err(fault)
    }
}

/// The store was closed, or its thread is gone.
pub(crate) fn closed() -> Error {
    Error::Unknown("the store was closed".into())
}
