//! Taking a lock away, and what that has in common with revoking it: all grants of a lock are changed, each with all of its keys.

use std::collections::BTreeSet;
use std::time::Duration;

use lockkeeper_core::{Fence, LockName, Result};

use crate::base::{base_stands, fence_at};
use crate::entry::{Line, One, State};
use crate::hold::{end, seconds};
use crate::layout::Mark;
use crate::order::Topic;
use crate::proto::RequestOp;
use crate::script::{get, put, queue, txn, unwritten, written};
use crate::store::Shared;
use crate::watch::Why;

/// How many keys are changed in one transaction. A grant has fewer.
const MOST: usize = 80;

/// A grant with all of its keys, or a key that holds the lock back.
pub struct Whole {
    pub keys: Vec<One>,
    pub names: Vec<LockName>,
}

/// All that keeps others out of a lock, as it was at one revision.
pub struct Holds {
    pub base: u64,
    pub wholes: Vec<Whole>,
    prefix: Vec<u8>,
    revision: i64,
}

impl Holds {
    /// How many of them one transaction can change. A grant of several names is changed as a whole.
    pub fn portion(&self) -> usize {
        let mut keys = 0;
        let fits = |whole: &&Whole| {
            keys += whole.keys.len();
            keys <= MOST
        };
        self.wholes.iter().take_while(fits).count()
    }
}

impl Shared {
    /// Takes the lock away from all who hold it. The write that does it has a revision of its own: that is the fence.
    pub async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let mut touched = BTreeSet::from([name.clone()]);
        loop {
            let holds = self.holds_of(name).await?;
            let some = &holds.wholes[..holds.portion()];
            let mut ends = Vec::new();
            for whole in some {
                ends.extend(self.ends_of(whole, holds.base).await?);
            }
            let (names, part) = (names_of(&touched, some), some.len() < holds.wholes.len());
            let told = Why::Broken { names: names.iter().cloned().collect(), reason: reason.into(), part };
            if let Some(fence) = self.change(&holds, some, ends, &names, &told).await? {
                if !part {
                    return Ok(fence);
                }
                touched = names;
            }
        }
    }

    async fn ends_of(&self, whole: &Whole, base: u64) -> Result<Vec<RequestOp>> {
        let entry = whole.keys.first().and_then(|one| one.entry.as_ref());
        let delay =
            entry.filter(|entry| entry.state == State::Granted).map_or(0, |entry| entry.lock_delay_ms);
        let lease = match delay {
            0 => None,
            _ => Some(self.link.grant_lease(seconds(Duration::from_millis(delay))).await?.0),
        };
        Ok(whole.keys.iter().map(|key| end(key, lease, State::Delayed, key.fence(base))).collect())
    }

    /// Reads all that keeps others out of a lock.
    pub async fn holds_of(&self, name: &LockName) -> Result<Holds> {
        let (prefix, floor) = (self.layout.queue(name), self.floor());
        let look = txn(Vec::new(), vec![get(&self.layout.base()), queue(&prefix)], Vec::new());
        let answer = self.lane.send(look, Vec::new()).await?;
        let revision = answer.revision;
        let mut ranges = answer.txn.ranges().into_iter();
        let found = ranges.next().and_then(|range| range.kvs.into_iter().next());
        self.learn_base(found.as_ref(), revision, floor).await?;
        let line = Line::read(&self.layout, name, ranges.next().unwrap_or_default());
        let mut wholes = Vec::new();
        for one in line.all.iter().filter(|one| line.holds(one) || one.is(State::Delayed)) {
            let (mut keys, mut names) = (vec![one.clone()], vec![name.clone()]);
            if one.is(State::Granted) {
                for other in self.other_names(one, name).await? {
                    let Some(place) = one.place else { continue };
                    let held = self.one_at(&other, &place).await?;
                    keys.extend(held.filter(|held| held.is(State::Granted)));
                    names.push(other);
                }
            }
            wholes.push(Whole { keys, names });
        }
        Ok(Holds { base: self.base(), wholes, prefix, revision })
    }

    /// Changes some of them, if nothing was written to the lock or to one of their keys since they were read. Returns the fence of the
    /// change. `None`: something was written.
    pub async fn change(
        &self,
        holds: &Holds,
        some: &[Whole],
        mut changes: Vec<RequestOp>,
        names: &BTreeSet<LockName>,
        told: &Why,
    ) -> Result<Option<Fence>> {
        let mut still = vec![base_stands(&self.layout, holds.base), unwritten(&holds.prefix, holds.revision)];
        still.extend(some.iter().flat_map(|whole| &whole.keys).map(|key| written(&key.key, key.written)));
        let why = self.layout.why();
        changes.push(put(&why, told.to_bytes(), 0));
        let mut about: Vec<_> = names.iter().map(Topic::new).collect();
        about.push(Topic::new(why));
        let answer = self.lane.send(txn(still, changes, Vec::new()), about).await?;
        if !answer.txn.succeeded {
            return Ok(None);
        }
        let fence = fence_at(holds.base, answer.revision)?;
        self.note(fence);
        Ok(Some(fence))
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

/// The names that a change touches, beside those that earlier parts of it have touched.
pub fn names_of(touched: &BTreeSet<LockName>, some: &[Whole]) -> BTreeSet<LockName> {
    touched.iter().chain(some.iter().flat_map(|whole| &whole.names)).cloned().collect()
}
