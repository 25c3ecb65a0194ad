//! Taking a lock away.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Fence, LockName, Names, Result};
use zookeeper_client as zk;

use crate::base::fence_at;
use crate::entry::{Kind, Note, State};
use crate::fault::Failure;
use crate::layout::Mark;
use crate::line::{Line, One};
use crate::link::Session;
use crate::script::{ANY, Op, create, delete, set};
use crate::store::Shared;

/// How many steps are in one transaction.
const MOST: usize = 200;

impl Shared {
    /// Takes the lock away from all who hold it. The write that does it has a number of its own: that is the fence.
    pub async fn break_lock(self: &Arc<Self>, name: &LockName, reason: &str) -> Result<Fence> {
        loop {
            match self.try_break(name, reason).await {
                Ok(Some(fence)) => {
                    let fence = fence?;
                    self.note(fence);
                    return Ok(fence);
                }
                Ok(None) | Err(Failure::Ended) => {}
                Err(failure) => return Err(failure.into()),
            }
        }
    }

    async fn try_break(
        self: &Arc<Self>,
        name: &LockName,
        reason: &str,
    ) -> Result<Option<Result<Fence>>, Failure> {
        let session = self.link.session().await?;
        // Nobody who holds it by now is overlooked.
        self.surely_catch_up(&session).await?;
        let (floor, base) = (self.floor(), self.base());
        let mut line = self.list(&session, name).await?;
        self.read(&session, &mut line, |i, one| i == 0 || one.mark.is_some()).await?;
        self.read_backs(&session, &mut line).await?;
        let (mut ops, mut touched, mut later) = (Vec::new(), vec![name.clone()], Vec::new());
        ops.extend(line.backs.iter().map(|back| delete(&back.path, ANY)));
        for one in line.holders() {
            let mut lines = vec![line.clone()];
            for other in self.other_names(&session, one, name).await? {
                lines.push(self.list(&session, &other).await?);
                touched.push(other);
            }
            let delay = one.entry().map_or(0, |entry| entry.lock_delay_ms);
            for line in &lines {
                self.end_of(line, one, delay, &mut ops, &mut later);
            }
        }
        if ops.len() > MOST {
            // Too many for one transaction: some of them now, and the rest at the next look.
            ops.truncate(MOST);
            self.write_or_look_again(&session, ops).await?;
            return Ok(None);
        }
        touched.sort();
        touched.dedup();
        let mut all = vec![self.base_stands(base), set(self.layout.bases(), Vec::new(), ANY)];
        all.append(&mut ops);
        all.extend(touched.iter().filter_map(|name| self.broken_event(name, reason)));
        let Some(done) = self.write_or_look_again(&session, all).await? else { return Ok(None) };
        for (path, delay) in later {
            self.remove_later(vec![path], Duration::from_millis(delay + 5));
        }
        let Some(stat) = done.stat() else { return Ok(None) };
        let fence = fence_at(base.number, stat.mzxid);
        if fence.as_ref().is_ok_and(|fence| fence.get() <= floor) {
            self.learn_base(&session, true).await?;
            return Ok(None);
        }
        Ok(Some(fence))
    }

    async fn write_or_look_again(
        self: &Arc<Self>,
        session: &Session,
        ops: Vec<Op>,
    ) -> Result<Option<crate::link::Done>, Failure> {
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

    /// The end of a hold in one line.
    fn end_of(&self, line: &Line, one: &One, delay: u64, ops: &mut Vec<Op>, later: &mut Vec<(String, u64)>) {
        let same = |other: &&One| other.path == one.path || (one.mark.is_some() && other.mark == one.mark);
        let Some(found) = line.all.iter().find(same) else { return };
        ops.push(delete(&found.path, ANY));
        let Some(mark) = one.mark else { return };
        let path = self.layout.back(&line.name, &mark);
        if line.notes.contains(&mark) {
            ops.push(delete(&path, ANY));
        }
        if let (Some(entry), true) = (one.entry(), delay > 0) {
            ops.push(create(&path, Note::of(entry, Kind::Delayed, delay, None)));
            later.push((path, delay));
        }
    }

    /// A grant of several names is lost as a whole: which are the others?
    async fn other_names(
        &self,
        session: &Session,
        one: &One,
        name: &LockName,
    ) -> Result<Vec<LockName>, Failure> {
        let (Some(entry), Some(mark)) = (one.entry().filter(|entry| entry.state == State::Granted), one.mark)
        else {
            return Ok(Vec::new());
        };
        let mut names = entry.names.clone();
        if let Some(first) = &entry.first {
            names = self.names_at(session, first, &mark).await?;
        }
        names.retain(|other| other != name);
        Ok(names)
    }

    async fn names_at(
        &self,
        session: &Session,
        first: &LockName,
        mark: &Mark,
    ) -> Result<Vec<LockName>, Failure> {
        let own = self.find_own(session, &Names::from(first.clone()), mark).await?;
        Ok(own.places.first().and_then(|one| one.entry()).map_or(Vec::new(), |entry| entry.names.clone()))
    }
}
