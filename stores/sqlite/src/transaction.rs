//! One transaction: its time, its fences, the changed names, and what the worker does after the commit.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use lockkeeper_core::table::Now;
use lockkeeper_core::{AcquireOutcome, BootInstant, Error, Fence, LockName, RequestKey, Result};
use lockkeeper_host::{Liveness, Process};
use rusqlite::Connection;

use crate::codec::{self, QueueTicket, instant_nanos};
use crate::error::sql_error;
use crate::fence_floor::FloorValues;
use crate::identity::StoreIdentity;
use crate::state_row::{PRECISION, StateRow};
use crate::statements;
use crate::waiters::Waiters;
use crate::wake_pipe::{Peer, PeerState};

/// The work after the commit.
#[derive(Debug, Default)]
pub(crate) struct PostCommit {
    pub replies: Vec<(QueueTicket, Result<AcquireOutcome>)>,
    /// The messages to write into the pipes of other stores.
    pub wakes: BTreeMap<Peer, BTreeSet<u64>>,
    /// Whether the transaction wrote events.
    pub events: bool,
    /// Whether the log must be on the disk before the worker answers any caller.
    pub durable: bool,
    /// The requests that were granted their locks.
    pub granted: Vec<RequestKey>,
    /// Names whose holders changed: the wake conditions of their waiters are stale.
    pub changed: BTreeSet<LockName>,
}

pub(crate) struct Tx<'e> {
    pub sql: &'e Connection,
    pub identity: &'e StoreIdentity,
    pub waiters: &'e Waiters,
    pub writes: bool,
    /// The time before the transaction began: leases count from here.
    pub sent: BootInstant,
    /// The time after the transaction began: every earlier commit is in its past.
    pub now: Now,
    pub after: PostCommit,
    /// Whether the file has watchers.
    pub watched: bool,
    /// Set by a reading transaction that found work for a writing one.
    pub needs_write: bool,
    /// Requests that joined the queue in this transaction: they are not among the waiters yet.
    pub enqueued: BTreeSet<QueueTicket>,
    /// Names whose queues may have a head that can be granted its lock now.
    pub changed_names: BTreeSet<LockName>,
    pub queue_lengths: HashMap<LockName, usize>,
    state: StateRow,
    stored: StateRow,
    /// The floor file, read once by a transaction that needs fences.
    floor: Option<FloorValues>,
    liveness: HashMap<Process, Liveness>,
    peer_states: HashMap<Peer, PeerState>,
}

impl<'e> Tx<'e> {
    pub fn new(
        sql: &'e Connection,
        identity: &'e StoreIdentity,
        waiters: &'e Waiters,
        writes: bool,
        sent: BootInstant,
        now: Now,
    ) -> Self {
        Tx {
            sql,
            identity,
            waiters,
            writes,
            sent,
            now,
            after: PostCommit::default(),
            watched: false,
            needs_write: false,
            enqueued: BTreeSet::new(),
            queue_lengths: HashMap::new(),
            changed_names: BTreeSet::new(),
            state: StateRow::default(),
            stored: StateRow::default(),
            floor: None,
            liveness: HashMap::new(),
            peer_states: HashMap::new(),
        }
    }

    /// Reads the state row, and removes the locks of another boot of the machine.
    pub fn load(&mut self) -> Result<()> {
        (self.stored, self.watched) = StateRow::read(self.sql)?;
        self.state = self.stored.clone();
        self.state.boot = self.identity.boot.clone().unwrap_or_default();
        if self.stored.is_of_another_boot(self.identity.boot.as_deref(), self.now.moment) {
            self.remove_other_boot().map_err(sql_error)?;
        }
        Ok(())
    }

    fn remove_other_boot(&mut self) -> rusqlite::Result<()> {
        for text in statements::NEW_BOOT {
            statements::run(self.sql, text)?;
        }
        statements::change(self.sql, statements::NEW_BOOT_RECORDS, [instant_nanos(self.now.moment)])?;
        if self.has_limits()? {
            statements::change(self.sql, statements::NEW_BOOT_BUCKETS, [instant_nanos(self.now.moment)])?;
        }
        self.state.written_at = BootInstant::default();
        // The restart may have lost the newest fence in the floor file, because it is not synced. Without its reserved number this
        // database counts as a copy, so the next fence, in this transaction or a later one, continues from the floor's.
        self.state.reserved = 0;
        self.watched = false;
        Ok(())
    }

    /// Writes the state row if it has changed, or if its time is too old.
    pub fn save(&self) -> Result<()> {
        let now = self.now.moment;
        if self.state == self.stored && now < self.stored.written_at + PRECISION {
            return Ok(());
        }
        assert!(self.state.fence >= self.stored.fence, "fences only grow");
        if self.floor.is_some() {
            self.identity.floor.write_latest(Fence::new(self.state.fence)?)?;
        }
        self.state.write(self.sql, now)
    }

    /// A number greater than every fence and version so far, also if the file or the wall clock has gone back.
    pub fn next_fence(&mut self) -> Result<Fence> {
        let mut last = self.state.fence;
        let floor = match self.floor {
            // This transaction has the write lock, so no other process changes the floor file.
            Some(floor) => floor,
            None => {
                let floor = self.identity.floor.read()?;
                last = last.max(floor.latest);
                // A database that does not know the reserved number is new, an old copy, or from before a restart of the machine.
                if floor.reserved > self.state.reserved {
                    last = last.max(floor.reserved);
                }
                *self.floor.insert(floor)
            }
        };
        let last = (last > 0).then(|| Fence::new(last)).transpose()?;
        let fence = Fence::after(last, self.now.wall)?;
        if fence.get() > self.state.reserved || floor.reserved < self.state.reserved {
            self.state.reserved = self.identity.floor.reserve(fence, self.now.wall)?;
            self.floor = Some(FloorValues { reserved: self.state.reserved, ..floor });
        }
        self.state.fence = fence.get();
        Ok(fence)
    }

    pub fn next_ticket(&mut self) -> QueueTicket {
        self.state.ticket += 1;
        self.state.ticket
    }

    /// Whether a process still runs, looked up once in a transaction.
    pub fn liveness(&mut self, process: &Process) -> Liveness {
        if process == self.identity.process {
            return Liveness::Alive;
        }
        *self.liveness.entry(process.clone()).or_insert_with_key(Process::life)
    }

    /// Whether an open store still reads its pipe, looked up once in a transaction.
    pub fn peer_state(&mut self, peer: &Peer) -> PeerState {
        if *peer == self.identity.peer {
            return PeerState::Alive;
        }
        *self.peer_states.entry(*peer).or_insert_with(|| self.identity.pipes.peer_state(peer))
    }

    /// Wakes another store for a ticket after the commit.
    pub fn wake_peer(&mut self, peer: Peer, ticket: QueueTicket) {
        self.after.wakes.entry(peer).or_default().insert(ticket.unsigned_abs());
    }

    /// Names whose holds or queues changed: [`Tx::grant_waiters`] serves their queues.
    pub fn mark_changed<'n>(&mut self, names: impl IntoIterator<Item = &'n LockName>) {
        for name in names {
            self.changed_names.insert(name.clone());
            self.after.changed.insert(name.clone());
        }
    }

    pub fn change(&self, text: &str, params: impl rusqlite::Params) -> Result<usize> {
        debug_assert!(self.writes, "a reading transaction changes nothing");
        statements::change(self.sql, text, params).map_err(sql_error)
    }

    pub fn one<T>(
        &self,
        text: &str,
        params: impl rusqlite::Params,
        read: impl FnOnce(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>> {
        codec::one(self.sql, text, params, read).map_err(sql_error)
    }

    pub fn all<T>(
        &self,
        text: &str,
        params: impl rusqlite::Params,
        read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>> {
        codec::all(self.sql, text, params, read).map_err(sql_error)
    }
}

/// The error of a call whose store was closed before it answered.
pub(crate) fn closed() -> Error {
    Error::Unknown("the store was closed".into())
}
