//! The transactions of an ask: to stand in line, to take the lock, and what is written down when it was granted.

use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{Error, Fence, Grant, LockName, Moment};
use zookeeper_client as zk;

use crate::acquire::{Asking, Joined, PAUSE, Step, Stop};
use crate::back::note_of;
use crate::base::fence_at;
use crate::book::{Hold, Known};
use crate::entry::{Entry, State};
use crate::fault::Failure;
use crate::judge::lost;
use crate::line::{Line, One};
use crate::link::Session;
use crate::script::{ANY, Op, check, create, set, stand};
use crate::watch::Word;

fn strange() -> Error {
    Error::Unknown("ZooKeeper gave a strange answer".into())
}

impl Asking<'_> {
    fn names(&self) -> &[LockName] {
        self.ask.claim.names.as_slice()
    }

    /// Whether all that others need to know of it is its place: then being the first is being granted. Those who watch
    /// need to know more, and so does a minimum hold.
    fn is_plain(&self) -> bool {
        let (ask, watched) = (self.ask, self.shared.is_watched());
        self.names().len() == 1 && ask.owner.is_none() && ask.min_hold.is_zero() && !watched
    }

    fn entry(&self, state: State, fence: Option<Fence>) -> Entry {
        Entry::new(self.ask, state, fence, self.shared.clock.wall())
    }

    /// The note of a grant: what outlives the session. A lock-delay needs one from the first moment on. A long ttl does
    /// not: the first lease is no longer than the session lasts, and the renewal writes the note. Most holds end before that.
    fn note(&self, session: &Session, entry: &Entry) -> Option<Vec<u8>> {
        if self.ask.lock_delay.is_zero() { None } else { note_of(session, entry) }
    }

    /// Stands in line. The answer says how many nodes are below the line then: whoever is alone there need not look.
    pub async fn join(&mut self, session: &Arc<Session>) -> Result<Joined, Stop> {
        let (shared, names, base) = (self.shared, self.ask.claim.names.as_slice(), self.shared.base());
        self.floor = shared.floor();
        let plain = self.is_plain();
        let entry = self.entry(if plain { State::Asked } else { State::Waiting }, None);
        let gate = shared.through_gate(session).await?;
        let mut ops = vec![shared.base_stands(base), gate.clone()];
        for name in names {
            ops.push(stand(
                shared.layout.place(name, &self.mark, self.ask.owner.is_some()),
                entry.under(name, names),
            ));
        }
        let note = if plain { self.note(session, &entry) } else { None };
        if let Some(note) = &note {
            ops.push(create(shared.layout.back(&names[0], &self.mark), note.clone()));
        }
        // The number of the transaction is told only by what was set in it (ZOOKEEPER-4026).
        ops.push(set(shared.layout.line(&names[0]), Vec::new(), ANY));
        // A name that was never asked for here needs a node for its line first; most have one.
        let parents = names.iter().filter(|name| !shared.lines.has([*name]));
        let parents = join_all(parents.map(|name| async move {
            session.make_parent(&shared.layout.line(name), shared.link.acls()).await
        }));
        let (parents, done) = tokio::join!(parents, shared.write_together(session, ops, &[]));
        if let Err(Failure::Unheard(_)) = &done {
            // It may be there.
            self.known = true;
        }
        let done = match done {
            Ok(done) => done,
            Err(failure) => {
                _ = shared.lines.remove(names);
                self.mend(session, failure, &gate, parents).await?;
                return Ok(Joined::Not);
            }
        };
        shared.lines.add(names);
        self.own = done.created().take(names.len()).map(str::to_owned).collect();
        (self.version, self.noted) = (0, note.is_some());
        let stat = done.stat().ok_or_else(strange)?;
        // All that is below the line was made here, so there is nobody else, and nothing that holds the lock back.
        let alone = plain && usize::try_from(stat.num_children) == Ok(done.created().count());
        Ok(if alone { Joined::Alone { sent_at: done.sent_at, zxid: stat.mzxid } } else { Joined::InLine })
    }

    /// Makes what was missing.
    async fn mend(
        &self,
        session: &Arc<Session>,
        failure: Failure,
        gate: &Op,
        parents: Vec<Result<(), Failure>>,
    ) -> Result<(), Stop> {
        match failure {
            Failure::Refused(0, zk::Error::NoNode | zk::Error::BadVersion) => {
                Ok(self.shared.learn_base(session, false).await?)
            }
            Failure::Refused(1, zk::Error::NoNode) => Ok(self.shared.mend_gate(session, gate).await?),
            Failure::Refused(_, zk::Error::NoNode) => {
                // The node of a line, which the servers took away just now; or everything.
                let refused =
                    parents.into_iter().filter_map(Result::err).find(|one| !one.is(&zk::Error::NoNode));
                if let Some(failure) = refused {
                    return Err(failure.into());
                }
                self.shared.make_root(session).await?;
                self.shared.make_events(session).await?;
                Ok(self.shared.learn_base(session, false).await?)
            }
            Failure::Refused(_, zk::Error::NodeExists) => {
                // A note of this very attempt, of a session that is gone.
                for name in self.names() {
                    session.delete(&self.shared.layout.back(name, &self.mark)).await?;
                }
                Ok(())
            }
            failure => Err(failure.into()),
        }
    }

    /// Nobody else was there when it was made: it is granted by having been made.
    pub async fn granted_at_once(
        &mut self,
        session: &Arc<Session>,
        sent_at: Moment,
        zxid: i64,
    ) -> Result<Step, Stop> {
        let fence = fence_at(self.shared.base().number, zxid)?;
        let entry = self.entry(State::Asked, None);
        self.granted(session, sent_at, fence, entry).await
    }

    /// The lines are free: takes them, in one write that fails if one of its own nodes is gone.
    pub async fn take(
        &mut self,
        session: &Arc<Session>,
        lines: &[Line],
        fence: Option<Fence>,
    ) -> Result<Step, Stop> {
        let (shared, names, base) = (self.shared, self.ask.claim.names.as_slice(), self.shared.base());
        self.floor = shared.floor();
        let entry = self.entry(State::Granted, fence);
        let note = self.note(session, &entry);
        let mut ops = vec![shared.base_stands(base)];
        for (line, own) in lines.iter().zip(&self.own) {
            if let Some(fence) = fence {
                // What it re-enters must still be there when it does, or somebody else may be in by then.
                let outer = line.holders().find(|one| one.path != *own && one.fence(base.number) == fence);
                let Some((path, read)) = outer.and_then(|one| Some((&one.path, one.read.as_ref()?))) else {
                    return Ok(Step::Again);
                };
                ops.push(check(path, read.stat.version));
            }
            ops.push(set(own, entry.under(&line.name, names), self.version));
            if let (Some(note), false) = (&note, self.noted) {
                ops.push(create(shared.layout.back(&line.name, &self.mark), note.clone()));
            }
            ops.extend(shared.event(&line.name, Word::Granted, fence, Some(&entry.holder)));
        }
        let done = match shared.write_together(session, ops, names).await {
            Ok(done) => done,
            Err(Failure::Refused(0, zk::Error::NoNode | zk::Error::BadVersion)) => {
                shared.learn_base(session, false).await?;
                return Ok(Step::Again);
            }
            Err(Failure::Refused(_, zk::Error::NodeExists)) => {
                self.noted = true;
                self.drop_notes().await?;
                return Ok(Step::Again);
            }
            Err(Failure::Refused(_, zk::Error::NoNode | zk::Error::BadVersion)) => {
                self.read_version(session).await?;
                shared.make_events(session).await?;
                return Ok(Step::Again);
            }
            // It may have been granted: the node says it, so the next look begins there.
            Err(failure @ Failure::Unheard(_)) => {
                self.own.clear();
                self.known = true;
                return Err(failure.into());
            }
            Err(failure) => return Err(failure.into()),
        };
        self.version += 1;
        self.noted = note.is_some();
        let stat = done.stat().copied().ok_or_else(strange)?;
        let told = match fence {
            Some(fence) => fence,
            None => fence_at(base.number, stat.mzxid)?,
        };
        self.granted(session, done.sent_at, told, entry).await
    }

    /// A plain request that is the first in line is taken for a holder, and its node is written anew when the lock is revoked. It was not
    /// granted then: what it takes now is newer than the revocation.
    async fn read_version(&mut self, session: &Session) -> Result<(), Failure> {
        if let [own] = &self.own[..]
            && let Some((_, stat)) = Failure::gone(session.get(own).await)?
        {
            self.version = stat.version;
        }
        Ok(())
    }

    /// The nodes of the same attempt, from an ask that was given up or not heard of. What hangs on another session counts
    /// for nothing. `None`: it has no place in line.
    pub async fn find_again(&mut self, session: &Arc<Session>) -> Result<Option<Step>, Stop> {
        if self.shared.book.open().ending.contains(&self.mark) {
            // Its time was over before it asked again, and its end is on its way.
            tokio::time::sleep(PAUSE).await;
            return Ok(Some(Step::Again));
        }
        self.shared.close_gate(session).await?;
        let sent_at = self.shared.clock.now();
        let found = self.shared.find_own(session, &self.ask.claim.names, &self.mark).await?;
        let (alive, dead): (Vec<_>, Vec<_>) = found
            .places
            .into_iter()
            .partition(|one| one.read.as_ref().is_some_and(|read| read.stat.ephemeral_owner == session.id));
        let version = alive.first().and_then(|one| Some(one.read.as_ref()?.stat.version)).unwrap_or(0);
        let whole = alive.len() == self.names().len()
            && alive.iter().all(|one| one.read.as_ref().is_some_and(|read| read.stat.version == version));
        if !whole || !dead.is_empty() {
            // Whatever was granted is not any more.
            self.shared.book.open().holds.entry(self.mark).and_modify(|hold| hold.known = None);
            self.shared.take_out(&self.ask.claim.names, &self.mark).await?;
            return Ok(None);
        }
        if let Some(reason) = alive.iter().find_map(One::revoked) {
            // It still holds what it has, for as long as it had it before it asked again.
            self.shared.book.expire_by(&self.mark, self.expires);
            return Err(Stop::Told(lost(reason)));
        }
        self.own = alive.iter().map(|one| one.path.clone()).collect();
        (self.version, self.noted, self.known) = (version, found.noted, false);
        let known = self.shared.book.open().holds.get(&self.mark).and_then(|hold| hold.known.clone());
        let base = self.shared.base().number;
        let fence = match known {
            // Other nodes of the same attempt are another ask.
            Some(known) if known.session.id == session.id && known.paths == self.own => known.fence,
            _ if alive[0].entry().is_some_and(|entry| entry.state == State::Granted) => alive[0].fence(base),
            // Whatever it was: it takes its turn in line.
            _ => return Ok(None),
        };
        // It has it already. A write proves that the session lives.
        let still: Vec<_> = self.own.iter().map(|path| check(path, version)).collect();
        match session.multi(&still).await {
            Ok(_) => {}
            Err(Failure::Refused(..)) => return Ok(Some(Step::Again)),
            Err(failure) => return Err(failure.into()),
        }
        let entry = alive[0].entry().cloned().unwrap_or_else(|| self.entry(State::Granted, None));
        self.shared.book.open().holds.entry(self.mark).and_modify(|hold| hold.known = None);
        self.resume(session, sent_at, fence, entry).map(Some)
    }

    /// Writes down what was granted before. Its fence is as it was.
    fn resume(
        &mut self,
        session: &Arc<Session>,
        sent_at: Moment,
        fence: Fence,
        entry: Entry,
    ) -> Result<Step, Stop> {
        self.write_down(session, sent_at, fence, entry);
        Ok(self.told(session, sent_at, fence))
    }

    async fn granted(
        &mut self,
        session: &Arc<Session>,
        sent_at: Moment,
        fence: Fence,
        entry: Entry,
    ) -> Result<Step, Stop> {
        let explicit = entry.fence.is_some();
        self.write_down(session, sent_at, fence, entry);
        if !explicit && fence.get() <= self.floor {
            // The ensemble was put back to an older state. The base is raised, and this grant is not one.
            self.shared.release_mark(&self.ask.claim.names, self.mark).await?;
            self.shared.learn_base(session, true).await?;
            self.forget_all();
            return Ok(Step::Again);
        }
        self.shared.note(fence);
        Ok(self.told(session, sent_at, fence))
    }

    fn forget_all(&mut self) {
        self.own.clear();
        (self.version, self.noted) = (0, false);
    }

    fn write_down(&self, session: &Arc<Session>, sent_at: Moment, fence: Fence, entry: Entry) {
        let known = Known {
            session: session.clone(),
            paths: self.own.clone(),
            version: self.version,
            fence,
            since: sent_at,
            entry,
            noted: self.noted,
            noting: false,
        };
        self.shared.book.write(
            self.mark,
            Hold {
                names: self.ask.claim.names.clone(),
                ttl: self.ask.ttl,
                expires: sent_at + self.ask.ttl,
                known: Some(known),
                caller: None,
            },
        );
    }

    fn told(&self, session: &Session, sent_at: Moment, fence: Fence) -> Step {
        let (claim, mode, ttl) = (self.ask.claim.clone(), self.ask.mode, self.ask.ttl);
        let lease = if self.noted { ttl } else { ttl.min(session.lasts()) };
        Step::Granted(Grant { claim, fence, mode, ttl, sent_at, lease })
    }

    /// One that waits has nothing that could be held back after its death.
    pub async fn drop_notes(&mut self) -> Result<(), Failure> {
        let Some(session) = self.session.clone().filter(|_| self.noted) else { return Ok(()) };
        for name in self.names() {
            session.delete(&self.shared.layout.back(name, &self.mark)).await?;
        }
        self.noted = false;
        Ok(())
    }
}
