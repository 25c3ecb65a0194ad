//! Taking a lock away from its holders, or asking them to give it back.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Fence, LockName, Result};
use zookeeper_client as zk;

use crate::acquire::Stop;
use crate::base::fence_at;
use crate::entry::{Kind, Note, State};
use crate::fault::Failure;
use crate::line::{Line, One};
use crate::link::{Done, Session};
use crate::script::{ANY, Op, create, delete, set};
use crate::store::Shared;
use crate::watch::Word;

/// How many steps are in one transaction, and how many bytes. What one holder has is never cut.
const MOST: usize = 200;
const BYTES: usize = 256 << 10;

/// What is done to a lock.
#[derive(Clone, Copy)]
pub struct Measure<'a> {
    /// [`Word::Broken`] or [`Word::Revoked`].
    pub word: Word,
    pub reason: &'a str,
}

/// One node of a holder.
pub struct Node {
    pub name: LockName,
    pub one: One,
    /// A note stands beside it.
    pub noted: bool,
}

/// What becomes of one holder: it happens as a whole or not at all.
#[derive(Default)]
struct Part {
    ops: Vec<Op>,
    /// Notes that are to be removed, and after how many milliseconds.
    later: Vec<(String, u64)>,
}

impl Shared {
    /// Takes the lock away from all who hold it. The write that does it has a number of its own: that is the fence.
    pub async fn break_lock(self: &Arc<Self>, name: &LockName, reason: &str) -> Result<Fence> {
        self.measure(name, Measure { word: Word::Broken, reason }).await
    }

    pub async fn measure(self: &Arc<Self>, name: &LockName, what: Measure<'_>) -> Result<Fence> {
        loop {
            match self.try_measure(name, what).await {
                Ok(Some(fence)) => {
                    self.note(fence);
                    return Ok(fence);
                }
                Ok(None) | Err(Stop::Failed(Failure::Ended)) => {}
                Err(Stop::Failed(failure)) => return Err(failure.into()),
                Err(Stop::Told(error)) => return Err(error),
            }
        }
    }

    /// `None`: something changed meanwhile.
    async fn try_measure(
        self: &Arc<Self>,
        name: &LockName,
        what: Measure<'_>,
    ) -> Result<Option<Fence>, Stop> {
        let session = self.link.session().await?;
        // No holder of this moment is overlooked.
        self.surely_catch_up(&session).await?;
        let (floor, base) = (self.floor(), self.base());
        let mut line = self.list(&session, name).await?;
        self.read(&session, &mut line, |i, one| i == 0 || one.mark.is_some()).await?;
        self.read_backs(&session, &mut line).await?;
        let mut parts = self.parts_of(&session, &line, what).await?;
        let mut last = batch(&mut parts);
        while !parts.is_empty() {
            let mut ops = vec![self.base_stands(base)];
            ops.append(&mut last.ops);
            if self.write_or_look_again(&session, ops).await?.is_none() {
                return Ok(None);
            }
            self.remove_notes_later(&mut last);
            last = batch(&mut parts);
        }
        let mut ops = vec![self.base_stands(base), set(self.layout.bases(), Vec::new(), ANY)];
        ops.append(&mut last.ops);
        ops.extend(self.event_because(name, what.word, what.reason));
        let Some(done) = self.write_or_look_again(&session, ops).await? else { return Ok(None) };
        self.remove_notes_later(&mut last);
        let Some(stat) = done.stat() else { return Ok(None) };
        let fence = fence_at(base.number, stat.mzxid)?;
        if fence.get() <= floor {
            self.learn_base(&session, true).await?;
            return Ok(None);
        }
        Ok(Some(fence))
    }

    /// What is to be done, one part for each holder. Other names of a holder are told of it once.
    async fn parts_of(&self, session: &Session, line: &Line, what: Measure<'_>) -> Result<Vec<Part>, Stop> {
        let (mut parts, mut told) = (Vec::new(), HashSet::from([line.name.clone()]));
        for back in &line.backs {
            // Until the lease is over, its holder may be there yet.
            if what.word == Word::Broken || !back.is_lease() {
                parts.push(Part { ops: vec![delete(&back.path, ANY)], later: Vec::new() });
            }
        }
        let mut lines = HashMap::new();
        for one in line.holders() {
            let nodes = self.nodes_of(session, line, one, &mut lines).await?;
            let mut part = match what.word {
                Word::Revoked => Part { ops: self.marked(&nodes, what.reason)?, later: Vec::new() },
                _ => self.ended(&nodes),
            };
            if part.ops.is_empty() {
                continue;
            }
            let others = nodes.iter().filter(|node| told.insert(node.name.clone()));
            part.ops.extend(others.filter_map(|node| self.event_because(&node.name, what.word, what.reason)));
            parts.push(part);
        }
        Ok(parts)
    }

    async fn write_or_look_again(
        self: &Arc<Self>,
        session: &Session,
        ops: Vec<Op>,
    ) -> Result<Option<Done>, Failure> {
        match self.write(session, &ops).await {
            Ok(done) => Ok(Some(done)),
            Err(Failure::Refused(
                step,
                zk::Error::NoNode | zk::Error::BadVersion | zk::Error::NodeExists,
            )) => {
                if step < 2 {
                    self.learn_base(session, false).await?;
                }
                self.make_events(session).await?;
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    fn remove_notes_later(self: &Arc<Self>, part: &mut Part) {
        for (path, delay) in part.later.drain(..) {
            self.remove_later(vec![path], Duration::from_millis(delay + 5));
        }
    }

    /// The end of a hold.
    fn ended(&self, nodes: &[Node]) -> Part {
        let mut part = Part::default();
        for Node { name, one, noted } in nodes {
            part.ops.push(delete(&one.path, ANY));
            let Some(mark) = one.mark else { continue };
            let path = self.layout.back(name, &mark);
            part.ops.extend(noted.then(|| delete(&path, ANY)));
            if let Some(entry) = nodes[0].one.entry().filter(|entry| entry.lock_delay_ms > 0) {
                let delay = entry.lock_delay_ms;
                part.ops.push(create(&path, Note::of(entry, Kind::Delayed, delay, None)));
                part.later.push((path, delay));
            }
        }
        part
    }

    /// The nodes of a holder, that in `line` first. A grant of several names has one in each of their lines. `lines`: those that were read.
    async fn nodes_of(
        &self,
        session: &Session,
        line: &Line,
        one: &One,
        lines: &mut HashMap<LockName, Line>,
    ) -> Result<Vec<Node>, Failure> {
        let noted = one.mark.is_some_and(|mark| line.notes.contains(&mark));
        let mut nodes = vec![Node { name: line.name.clone(), one: one.clone(), noted }];
        let Some(entry) = one.entry().filter(|entry| entry.state == State::Granted) else { return Ok(nodes) };
        let mut names = entry.names.clone();
        if let Some(first) = &entry.first {
            let first = self.node_in(session, first, one, lines).await?;
            names = first.and_then(|node| Some(node.one.entry()?.names.clone())).unwrap_or_default();
        }
        for name in names.iter().filter(|name| **name != line.name) {
            nodes.extend(self.node_in(session, name, one, lines).await?);
        }
        Ok(nodes)
    }

    /// The node of the same attempt in another line.
    async fn node_in(
        &self,
        session: &Session,
        name: &LockName,
        of: &One,
        lines: &mut HashMap<LockName, Line>,
    ) -> Result<Option<Node>, Failure> {
        if !lines.contains_key(name) {
            lines.insert(name.clone(), self.list(session, name).await?);
        }
        let Some(line) = lines.get_mut(name) else { return Ok(None) };
        self.read(session, line, |_, one| one.mark == of.mark).await?;
        let Some(one) = line.all.iter().find(|one| one.mark == of.mark) else { return Ok(None) };
        let noted = one.mark.is_some_and(|mark| line.notes.contains(&mark));
        Ok(Some(Node { name: name.clone(), one: one.clone(), noted }))
    }
}

/// Takes out what fits into one transaction; one part does at least.
fn batch(parts: &mut Vec<Part>) -> Part {
    let (mut steps, mut bytes) = (0, 0);
    let fits = |part: &&Part| {
        steps += part.ops.len();
        bytes += part.ops.iter().map(Op::size).sum::<usize>();
        steps <= MOST && bytes <= BYTES
    };
    let count = parts.iter().take_while(fits).count().max(1).min(parts.len());
    let mut together = Part::default();
    for mut part in parts.drain(..count) {
        together.ops.append(&mut part.ops);
        together.later.append(&mut part.later);
    }
    together
}
