//! Taking a lock away.

use std::time::Duration;

use lockkeeper_core::{Fence, LockName, Result};

use crate::base::{base_stands, fence_at};
use crate::entry::{Line, One, State};
use crate::hold::{end, seconds};
use crate::layout::Mark;
use crate::order::Topic;
use crate::script::{get, put, queue, txn, unwritten, written};
use crate::store::Shared;
use crate::watch::Why;

/// How many holds are ended in one transaction.
const MOST: usize = 80;

impl Shared {
    /// Takes the lock away from all who hold it. The write that does it has a revision of its own: that is the fence.
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        loop {
            if let Some(fence) = self.try_break(name, reason).await? {
                self.note(fence);
                return Ok(fence);
            }
        }
    }

    async fn try_break(&self, name: &LockName, reason: &str) -> Result<Option<Fence>> {
        let (prefix, floor) = (self.layout.queue(name), self.floor());
        let look = txn(Vec::new(), vec![get(&self.layout.base()), queue(&prefix)], Vec::new());
        let answer = self.lane.send(look, Vec::new()).await?;
        let revision = answer.revision;
        let mut ranges = answer.txn.ranges().into_iter();
        let found = ranges.next().and_then(|range| range.kvs.into_iter().next());
        self.learn_base(found.as_ref(), revision, floor).await?;
        let base = self.base();
        let line = Line::read(&self.layout, name, ranges.next().unwrap_or_default());
        let mut still = vec![base_stands(&self.layout, base), unwritten(&prefix, revision)];
        let (mut ends, mut touched) = (Vec::new(), vec![name.clone()]);
        for one in line.all.iter().filter(|one| line.holds(one) || one.is(State::Delayed)) {
            let delay = one.entry.as_ref().filter(|entry| entry.state == State::Granted);
            let delay = Duration::from_millis(delay.map_or(0, |entry| entry.lock_delay_ms));
            let mut keys = vec![one.clone()];
            if one.is(State::Granted) {
                for other in self.other_names(one, name).await? {
                    let Some(place) = one.place else { continue };
                    let held = self.one_at(&other, &place).await?;
                    keys.extend(held.filter(|held| held.is(State::Granted)));
                    touched.push(other);
                }
            }
            let lease = match delay.is_zero() {
                true => None,
                false => Some(self.link.grant_lease(seconds(delay)).await?.0),
            };
            for key in &keys {
                still.push(written(&key.key, key.written));
                ends.push(end(key, lease, State::Delayed, key.fence(base)));
            }
        }
        touched.sort();
        touched.dedup();
        if ends.len() > MOST {
            // Too many for one transaction: some of them now, and the rest at the next look.
            still.truncate(2 + MOST);
            ends.truncate(MOST);
            self.lane.send(txn(still, ends, Vec::new()), touched.iter().map(Topic::new).collect()).await?;
            return Ok(None);
        }
        let (why, told) = (self.layout.why(), Why::Broken { names: touched.clone(), reason: reason.into() });
        ends.push(put(&why, told.to_bytes(), 0));
        let mut about: Vec<_> = touched.iter().map(Topic::new).collect();
        about.push(Topic::new(why));
        let answer = self.lane.send(txn(still, ends, Vec::new()), about).await?;
        match answer.txn.succeeded {
            true => fence_at(base, answer.revision).map(Some),
            false => Ok(None),
        }
    }

    /// A grant of several names is lost as a whole: which are the others?
    async fn other_names(&self, one: &One, name: &LockName) -> Result<Vec<LockName>> {
        let (Some(entry), Some(place)) = (&one.entry, one.place) else { return Ok(Vec::new()) };
        let mut names = entry.names.clone();
        if let Some(first) = &entry.first {
            names = self
                .one_at(first, &place)
                .await?
                .and_then(|one| one.entry)
                .map_or(Vec::new(), |entry| entry.names);
        }
        names.retain(|other| other != name);
        Ok(names)
    }

    async fn one_at(&self, name: &LockName, place: &Mark) -> Result<Option<One>> {
        let look = txn(Vec::new(), vec![get(&self.layout.key(name, place))], Vec::new());
        let found = self.lane.send(look, Vec::new()).await?.txn.one();
        Ok(found.and_then(|kv| One::read(&self.layout, name, kv)))
    }
}
