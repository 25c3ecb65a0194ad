//! Renewing: one write for many grants. It proves to us that the session lives, and that their nodes are there. It must be a
//! write: what a single server says may be long out of date.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{Grant, Moment, Names, Renewal, Result};
use zookeeper_client as zk;

use crate::back::note_of;
use crate::book::Known;
use crate::entry::Entry;
use crate::fault::Failure;
use crate::layout::{self, Mark};
use crate::link::Session;
use crate::script::{ANY, Op, check, create, delete};
use crate::store::Shared;

/// How many nodes are checked in one transaction.
const BATCH: usize = 128;

/// Those that are to be given back, and why.
type Revoked = HashMap<Mark, Arc<str>>;

/// A hold that is to be renewed.
struct Renewed {
    mark: Mark,
    names: Names,
    known: Known,
    /// What is to hold the lock back after the death of its holder, if that is not written yet.
    note: Option<Vec<u8>>,
    /// One is there already, and is written anew.
    again: bool,
}

impl Shared {
    pub async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        let now = self.clock.now();
        let marks: Vec<Mark> = grants.iter().map(|grant| layout::mark(&grant.claim.attempt)).collect();
        let (mut kept, mut revoked, mut unheard) = (HashSet::new(), HashMap::new(), HashSet::new());
        if self.may_have(&marks) {
            let session = self.link.session().await?;
            let mut due = self.due(&session, &marks);
            while !due.is_empty() {
                let some = due.split_off(due.len() - a_batch_of(&due));
                let marks_of_batch: Vec<Mark> = some.iter().map(|one| one.mark).collect();
                match self.still_there(&session, some, &mut revoked).await {
                    Ok(there) => self.renewed(&session, there, &mut kept).await,
                    Err(Failure::Ended) => break,
                    Err(failure) if kept.is_empty() && revoked.is_empty() => return Err(failure.into()),
                    Err(failure) => {
                        // The others were heard of. Nothing is known of these, and a connection that has failed is not asked again here.
                        tracing::debug!(?failure, "some renewals were not answered");
                        unheard.extend(marks_of_batch.into_iter().chain(due.drain(..).map(|one| one.mark)));
                    }
                }
            }
        }
        let answers = marks.iter().zip(grants).map(|(mark, grant)| match revoked.get(mark) {
            Some(reason) => Renewal::Revoked(Arc::clone(reason)),
            None if unheard.contains(mark) => Renewal::Unknown,
            None => self.count_anew(now, mark, grant, &kept),
        });
        let answers = answers.collect();
        self.book.look();
        Ok(answers)
    }

    /// Whether there is anything to renew. What hung on a session that is over is lost, and nobody need be asked.
    fn may_have(&self, marks: &[Mark]) -> bool {
        let pages = self.book.open();
        let known = |mark: &Mark| pages.holds.get(mark)?.known.as_ref();
        marks.iter().filter_map(known).any(|known| !known.session.is_over())
    }

    /// What is to be renewed, and what is to be written for it. Whoever gives it back from now on knows that there may be a
    /// note.
    fn due(&self, session: &Session, marks: &[Mark]) -> Vec<Renewed> {
        let mut pages = self.book.open();
        let mut due = Vec::new();
        for mark in marks.iter().filter(|mark| !pages.ending.contains(*mark)).copied().collect::<HashSet<_>>()
        {
            let Some(hold) = pages.holds.get_mut(&mark) else { continue };
            let Some(known) = hold.known.as_mut().filter(|known| known.session.id == session.id) else {
                continue;
            };
            let note = if known.noted { None } else { note_of(session, &known.entry) };
            known.noting |= note.is_some();
            due.push(Renewed { mark, names: hold.names.clone(), known: known.clone(), note, again: false });
        }
        due
    }

    async fn still_there(
        &self,
        session: &Session,
        mut some: Vec<Renewed>,
        revoked: &mut Revoked,
    ) -> Result<Vec<Renewed>, Failure> {
        while !some.is_empty() {
            let ops: Vec<Op> = some.iter().flat_map(|one| self.steps(one)).collect();
            match session.multi(&ops).await {
                Ok(_) => break,
                Err(Failure::Refused(step, zk::Error::NodeExists)) => {
                    // Of a renewal that was not heard of, or of the same attempt in a session that is gone. It is replaced in the
                    // transaction itself: in between there would be none, and another renewal may count on it.
                    if let Some(one) = at(&mut some, step) {
                        one.again = true;
                    }
                    continue;
                }
                Err(Failure::Refused(step, zk::Error::NoNode | zk::Error::BadVersion)) => {
                    // Or a note that was to be replaced is gone.
                    if let Some(one) = at(&mut some, step).filter(|one| one.again) {
                        one.again = false;
                        self.delete_note(session, one).await?;
                    }
                }
                Err(failure) => return Err(failure),
            }
            // One is missing or was written anew, at least: which are?
            let found = join_all(some.iter().map(|one| find(session, &one.known))).await;
            let mut left = Vec::new();
            for (one, found) in some.into_iter().zip(found) {
                match found? {
                    Found::There => left.push(one),
                    Found::Revoked(reason) => _ = revoked.insert(one.mark, reason),
                    Found::Gone => {}
                }
            }
            some = left;
        }
        Ok(some)
    }

    fn steps(&self, one: &Renewed) -> Vec<Op> {
        let mut ops: Vec<Op> = one.known.paths.iter().map(|path| check(path, one.known.version)).collect();
        if let Some(note) = &one.note {
            for name in one.names.iter() {
                let path = self.layout.back(name, &one.mark);
                ops.extend(one.again.then(|| delete(&path, ANY)));
                ops.push(create(path, note.clone()));
            }
        }
        ops
    }

    async fn delete_note(&self, session: &Session, one: &Renewed) -> Result<(), Failure> {
        if one.note.is_some() {
            for name in one.names.iter() {
                session.delete(&self.layout.back(name, &one.mark)).await?;
            }
        }
        Ok(())
    }

    /// Writes down what was renewed. If it was given back meanwhile, whoever did that may not have seen the note.
    async fn renewed(&self, session: &Session, there: Vec<Renewed>, kept: &mut HashSet<Mark>) {
        for one in there {
            let held = match self.book.open().holds.get_mut(&one.mark).and_then(|hold| hold.known.as_mut()) {
                Some(known) if known.paths == one.known.paths => {
                    known.noted |= one.note.is_some();
                    known.noting = false;
                    true
                }
                _ => false,
            };
            if held {
                kept.insert(one.mark);
            } else {
                _ = self.delete_note(session, &one).await;
            }
        }
    }

    /// The lease counts anew, or it is lost.
    fn count_anew(&self, now: Moment, mark: &Mark, grant: &Grant, kept: &HashSet<Mark>) -> Renewal {
        let mut pages = self.book.open();
        match pages.holds.get_mut(mark) {
            Some(hold) if kept.contains(mark) => {
                hold.expires = hold.expires.max(now + grant.ttl);
                Renewal::Renewed
            }
            Some(hold) if hold.caller.is_none() => {
                // A later good answer would not bring it back. What is left of it is taken away.
                (hold.known, hold.expires) = (None, now + grant.ttl);
                Renewal::Lost
            }
            _ => Renewal::Lost,
        }
    }
}

/// Which of them a step belongs to.
fn at(some: &mut [Renewed], step: usize) -> Option<&mut Renewed> {
    let mut first = 0;
    some.iter_mut().find(|one| {
        let notes = if one.note.is_some() { one.names.count() * if one.again { 2 } else { 1 } } else { 0 };
        first += one.known.paths.len() + notes;
        step < first
    })
}

/// How many of the last fit into one transaction; one does at least.
fn a_batch_of(due: &[Renewed]) -> usize {
    let mut nodes = 0;
    let fits = |one: &&Renewed| {
        nodes += one.known.paths.len();
        nodes <= BATCH
    };
    due.iter().rev().take_while(fits).count().max(1)
}

/// What became of a hold that could not be renewed together with the others.
enum Found {
    There,
    /// It is there, and is to be given back.
    Revoked(Arc<str>),
    Gone,
}

async fn find(session: &Session, known: &Known) -> Result<Found, Failure> {
    let mut answer = Found::There;
    for found in join_all(known.paths.iter().map(|path| session.get(path))).await {
        match Failure::gone(found)? {
            None => return Ok(Found::Gone),
            Some((_, stat)) if stat.version == known.version => {}
            Some((data, _)) => {
                match serde_json::from_slice::<Entry>(&data).ok().and_then(|entry| entry.revoked) {
                    Some(reason) => answer = Found::Revoked(reason.into()),
                    None => return Ok(Found::Gone),
                }
            }
        }
    }
    Ok(answer)
}
