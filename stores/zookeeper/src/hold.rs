//! Giving back, and letting go of what was not renewed.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Fence, LockName, Names, Release, Result};
use zookeeper_client as zk;

use crate::book::{Hold, Known};
use crate::entry::{Kind, Note, State, millis};
use crate::fault::Failure;
use crate::layout::Mark;
use crate::line::One;
use crate::link::{Done, Session};
use crate::script::{ANY, Op, create, delete};
use crate::store::Shared;
use crate::watch::Word;

/// What an attempt has.
pub struct Own {
    pub places: Vec<One>,
    pub noted: bool,
}

/// Something that is being given back. If that does not come to a good end, also because nobody waits for it any more, the process
/// sees to it that it is gone all the same: nobody may come back to it.
struct Leaving<'a> {
    shared: &'a Shared,
    mark: Mark,
    names: &'a Names,
    done: bool,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if !self.done {
            let (names, expires) = (self.names.clone(), self.shared.clock.now());
            let hold = Hold { names, ttl: Duration::ZERO, expires, known: None, caller: None };
            self.shared.book.write(self.mark, hold);
        }
    }
}

impl Shared {
    /// Gives back, or leaves the line.
    pub async fn release_mark(self: &Arc<Self>, names: &Names, mark: Mark) -> Result<Release, Failure> {
        let hold = {
            let mut pages = self.book.open();
            pages.ending.remove(&mark);
            pages.holds.remove(&mark)
        };
        let mut leaving = Leaving { shared: self, mark, names, done: false };
        let caller = hold.as_ref().and_then(|hold| hold.caller.clone());
        if let Some(caller) = &caller {
            caller.leave();
        }
        let done = match hold.as_ref().and_then(|hold| hold.known.as_ref()) {
            Some(known) if !known.session.is_over() => self.give_back(names, &mark, known).await,
            // The ask is still under way, and knows itself what it has lost.
            _ if caller.is_some() => self.take_out(names, &mark).await,
            _ => self.take_out_lost(names, &mark).await,
        };
        leaving.done = done.is_ok();
        match done {
            Ok(Release::AlreadyGone) if caller.is_some_and(|caller| caller.gave_place_up()) => {
                Ok(Release::Released)
            }
            done => done,
        }
    }

    async fn give_back(
        self: &Arc<Self>,
        names: &Names,
        mark: &Mark,
        known: &Known,
    ) -> Result<Release, Failure> {
        let session = self.link.session().await?;
        let held = self.clock.now().since(known.since);
        let lingers = Duration::from_millis(known.entry.min_hold_ms).saturating_sub(held);
        let back = (!lingers.is_zero()).then_some((Kind::Lingering, lingers));
        match self.end(&session, names, mark, known, back, Word::Released).await {
            Ok(()) => Ok(Release::Released),
            // Somebody was there: it was taken away, or a part of it was deleted.
            Err(Failure::Refused(..) | Failure::Ended) => self.take_out(names, mark).await,
            Err(failure) => Err(failure),
        }
    }

    /// Its time is over, and it was not renewed.
    pub async fn expire(self: &Arc<Self>, mark: &Mark, hold: &Hold, known: &Known) -> Result<(), Failure> {
        let session = self.link.session().await?;
        if session.id == known.session.id {
            let delay = Duration::from_millis(known.entry.lock_delay_ms);
            let back = (!delay.is_zero()).then_some((Kind::Delayed, delay));
            match self.end(&session, &hold.names, mark, known, back, Word::Expired).await {
                Ok(()) => return Ok(()),
                Err(Failure::Refused(..) | Failure::Ended) => {}
                Err(failure) => return Err(failure),
            }
        }
        // It went with its session, or by somebody's hand, and its note holds the lock back for as long as is needed; or it is there.
        self.take_away(&hold.names, mark, Word::Expired).await.map(|_| ())
    }

    /// The end of a grant, in one transaction: its nodes go, and a note stays where the lock is to be held back.
    async fn end(
        self: &Arc<Self>,
        session: &Arc<Session>,
        names: &Names,
        mark: &Mark,
        known: &Known,
        back: Option<(Kind, Duration)>,
        word: Word,
    ) -> Result<(), Failure> {
        loop {
            // A transaction that would have to tell is refused if we do not know that somebody watches.
            let base = self.base();
            let mut ops = vec![self.base_stands(base)];
            let mut paths = Vec::new();
            for (name, own) in names.iter().zip(&known.paths) {
                let path = self.layout.back(name, mark);
                ops.push(delete(own, known.version));
                if known.noted || known.noting {
                    ops.push(delete(&path, ANY));
                }
                if let Some((kind, time)) = back {
                    let note = Note::of(&known.entry, kind, millis(time), Some(known.fence));
                    ops.push(create(&path, note));
                    paths.push(path);
                }
                ops.extend(self.event(name, word, Some(known.fence), Some(&known.entry.holder)));
            }
            match self.write_together(session, ops, &[]).await {
                Err(Failure::Refused(0, zk::Error::NoNode | zk::Error::BadVersion))
                    if self.base_moved(session, base).await? => {}
                Ok(_) => {
                    if let Some((_, time)) = back {
                        self.remove_later(paths, time + Duration::from_millis(5));
                    }
                    return Ok(());
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// A write, and what is to be done after every write.
    pub async fn write(self: &Arc<Self>, session: &Session, ops: &[Op]) -> Result<Done, Failure> {
        let done = session.multi(ops).await?;
        self.was_written(&done);
        Ok(done)
    }

    /// The same, in company. `grants`: the names that it grants.
    pub async fn write_together(
        self: &Arc<Self>,
        session: &Arc<Session>,
        ops: Vec<Op>,
        grants: &[LockName],
    ) -> Result<Done, Failure> {
        let done = self.lane.send(session, ops, grants).await?;
        self.was_written(&done);
        Ok(done)
    }

    fn was_written(self: &Arc<Self>, done: &Done) {
        if let Some(stat) = done.stat() {
            self.link.heard(stat.mtime);
        }
        self.forget_events_later(done);
    }

    /// Something may be there without the server that we talk to knowing of it yet: a write, which a majority has to take, makes
    /// that catch up.
    pub async fn surely_catch_up(&self, session: &Session) -> Result<(), Failure> {
        Failure::gone(session.set(&self.layout.bases(), b"", ANY).await).map(drop)
    }

    /// What an attempt has in the lines of these names, also what was written on a connection that is gone.
    pub async fn find_own(&self, session: &Session, names: &Names, mark: &Mark) -> Result<Own, Failure> {
        self.surely_catch_up(session).await?;
        let lines = self.list_all(session, names.as_slice()).await?;
        let mut own = Own { places: Vec::new(), noted: false };
        for mut line in lines {
            line.all.retain(|one| one.mark.as_ref() == Some(mark));
            self.read(session, &mut line, |_, _| true).await?;
            own.places.append(&mut line.all);
            own.noted |= line.notes.contains(mark) || line.orphans.iter().any(|(_, orphan)| orphan == mark);
        }
        Ok(own)
    }

    /// The same for an ask that may be on its way yet.
    pub async fn take_out_lost(self: &Arc<Self>, names: &Names, mark: &Mark) -> Result<Release, Failure> {
        match self.close_gate(&*self.link.session().await?).await {
            // What was sent in a session that has ended does not arrive.
            Ok(()) | Err(Failure::Ended) => self.take_out(names, mark).await,
            Err(failure) => Err(failure),
        }
    }

    /// Takes whatever an attempt has out of the lines: it is looked for first. A grant goes as a whole.
    pub async fn take_out(self: &Arc<Self>, names: &Names, mark: &Mark) -> Result<Release, Failure> {
        self.take_away(names, mark, Word::Released).await
    }

    /// The same, as a release or as the unclean end of a grant.
    async fn take_away(self: &Arc<Self>, names: &Names, mark: &Mark, word: Word) -> Result<Release, Failure> {
        loop {
            let session = self.link.session().await?;
            let own = match self.find_own(&session, names, mark).await {
                Err(Failure::Ended) => continue,
                own => own?,
            };
            let back = match word {
                Word::Expired => self.delayed(&own.places),
                _ => self.lingers(&own.places),
            };
            let mut ops: Vec<Op> = own.places.iter().map(|one| delete(&one.path, ANY)).collect();
            for name in names.iter().filter(|_| own.noted || back.is_some()) {
                let path = self.layout.back(name, mark);
                let note = Failure::gone(session.get(&path).await)?;
                let said = note.as_ref().and_then(|(data, _)| serde_json::from_slice::<Note>(data).ok());
                let unclean = |note: &Note| own.places.is_empty() && note.delay;
                if said.is_some_and(|note| note.kind == Kind::Lingering || unclean(&note)) {
                    // It was released already; or it ended uncleanly, and that cannot be made good.
                    continue;
                }
                ops.extend(note.map(|_| delete(&path, ANY)));
                ops.extend(back.as_ref().map(|(note, _)| create(&path, note.clone())));
            }
            if ops.is_empty() {
                return Ok(Release::AlreadyGone);
            }
            for (name, one) in names.iter().zip(&own.places) {
                if let Some(entry) = one.entry().filter(|entry| entry.state == State::Granted) {
                    let fence: Fence = one.fence(self.base().number);
                    ops.extend(self.event(name, word, Some(fence), Some(&entry.holder)));
                }
            }
            match self.write(&session, &ops).await {
                Ok(_) if own.places.is_empty() => return Ok(Release::AlreadyGone),
                Ok(_) => {
                    if let Some((_, time)) = back {
                        let paths = names.iter().map(|name| self.layout.back(name, mark)).collect();
                        self.remove_later(paths, time + Duration::from_millis(5));
                    }
                    return Ok(Release::Released);
                }
                // Something of it went meanwhile, or the session did: looked for again.
                Err(Failure::Refused(_, zk::Error::NodeExists) | Failure::Ended) => {}
                Err(Failure::Refused(_, zk::Error::NoNode)) => self.make_events(&session).await?,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// For how long the lock is held back after an unclean end, and the note that says so.
    fn delayed(&self, places: &[One]) -> Option<(Vec<u8>, Duration)> {
        let one = places.first()?;
        let entry = one.entry().filter(|entry| entry.lock_delay_ms > 0)?;
        let (ms, fence) = (entry.lock_delay_ms, one.fence(self.base().number));
        Some((Note::of(entry, Kind::Delayed, ms, Some(fence)), Duration::from_millis(ms)))
    }

    /// For how much longer a minimum hold lasts, and the note that says so.
    fn lingers(&self, places: &[One]) -> Option<(Vec<u8>, Duration)> {
        let one = places.first()?;
        let entry = one.entry().filter(|entry| entry.state == State::Granted && entry.min_hold_ms > 0)?;
        if entry.revoked.is_some() {
            // Whoever revoked it wants it to be free.
            return None;
        }
        let since = one.read.as_ref()?.stat.mtime.unsigned_abs();
        let left = (since + entry.min_hold_ms).checked_sub(self.link.tide()?)?.min(entry.min_hold_ms);
        let note = Note::of(entry, Kind::Lingering, left, Some(one.fence(self.base().number)));
        (left > 0).then_some((note, Duration::from_millis(left)))
    }
}
