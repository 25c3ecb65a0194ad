//! The line of one name: those who hold it and those who wait, as they were at one moment.

use std::collections::{HashMap, HashSet};

use lockkeeper_core::rules::{Stake, Verdict, judge};
use lockkeeper_core::{Fence, Held, Holder, LockName, Mode, Owner, Queued, Wall};
use zookeeper_client::Stat;

use crate::entry::{Entry, Kind, Note, State};
use crate::layout::{self, Child, Mark};

/// Somebody in the line, holders included.
#[derive(Clone, Debug)]
pub struct One {
    pub path: String,
    pub mark: Option<Mark>,
    pub owned: bool,
    pub order: u64,
    /// What was read of it. `None`: it was not looked at.
    pub read: Option<Read>,
}

#[derive(Clone, Debug)]
pub struct Read {
    /// `None`: somebody else's, as Curator writes it.
    pub entry: Option<Entry>,
    pub stat: Stat,
}

impl One {
    pub fn entry(&self) -> Option<&Entry> {
        self.read.as_ref()?.entry.as_ref()
    }

    pub fn is(&self, state: State) -> bool {
        self.entry().is_some_and(|entry| entry.state == state)
    }

    /// Which write of the node was read.
    pub fn written(&self) -> Option<i64> {
        self.read.as_ref().map(|read| read.stat.mzxid)
    }

    pub fn is_foreign(&self) -> bool {
        self.mark.is_none() || self.read.as_ref().is_some_and(|read| read.entry.is_none())
    }

    pub fn fence(&self, base: u64) -> Fence {
        let zxid = self.read.as_ref().map_or(0, |read| read.stat.mzxid.unsigned_abs());
        let counted = || Fence::new(base.saturating_add(zxid)).unwrap_or(Fence::MAX);
        self.entry().and_then(|entry| entry.fence).unwrap_or_else(counted)
    }

    pub fn owner(&self) -> Option<Owner> {
        Owner::from_hex(self.entry()?.owner.as_ref()?).ok()
    }

    /// Why its holder is to give it back, if it is.
    pub fn revoked(&self) -> Option<&str> {
        self.entry()?.revoked.as_deref()
    }

    pub fn mode(&self) -> Mode {
        self.entry().map_or(Mode::Exclusive, |entry| entry.mode)
    }

    fn holder(&self) -> Holder {
        match self.entry() {
            Some(entry) => entry.holder.clone(),
            None => {
                let session = self.read.as_ref().map_or(0, |read| read.stat.ephemeral_owner);
                let label = Some("somebody else's client".to_owned());
                Holder { host: format!("ZooKeeper session {session:#x}"), pid: 0, label }
            }
        }
    }

    fn since(&self) -> Wall {
        let time = self.read.as_ref().map_or(0, |read| read.stat.ctime.unsigned_abs());
        self.entry().map_or(Wall::from_micros(time.saturating_mul(1000)), |entry| entry.since_us)
    }

    pub fn held(&self, base: u64) -> Held {
        Held {
            holder: self.holder(),
            fence: self.fence(base),
            mode: self.mode(),
            since: self.since(),
            expires_in_ms: self.entry().map_or(1, |entry| entry.ttl_ms),
            lingering: false,
            revoked: self.revoked().map(str::to_owned),
        }
    }

    pub fn queued(&self) -> Queued {
        Queued { holder: self.holder(), mode: self.mode(), since: self.since() }
    }
}

/// Something that holds the lock back.
#[derive(Clone, Debug)]
pub struct Back {
    pub path: String,
    /// `None`: what is written there is nothing that we know.
    pub note: Option<Note>,
    /// For how much longer, in milliseconds.
    pub left: u64,
}

impl Back {
    pub fn lingers(&self) -> bool {
        self.note.as_ref().is_some_and(|note| note.kind == Kind::Lingering)
    }

    /// Whether the holder may still believe that it holds the lock.
    pub fn is_lease(&self) -> bool {
        self.note.as_ref().is_some_and(|note| note.lease)
    }

    pub fn held(&self) -> Option<Held> {
        let note = self.note.as_ref().filter(|note| note.kind == Kind::Lingering)?;
        Some(Held {
            holder: note.holder.clone(),
            fence: note.fence?,
            mode: note.mode,
            since: note.since_us,
            expires_in_ms: self.left,
            lingering: true,
            revoked: None,
        })
    }
}

/// The line of one name, the oldest first.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: LockName,
    pub all: Vec<One>,
    /// What holds it back now.
    pub backs: Vec<Back>,
    /// The notes of those who are not in line any more, before they were looked at.
    pub orphans: Vec<(String, Mark)>,
    /// The notes of those who are in line.
    pub notes: HashSet<Mark>,
    /// The last change of the line itself.
    pub changed: i64,
}

impl Line {
    pub fn read(name: &LockName, dir: &str, children: Vec<String>, changed: i64) -> Line {
        let (mut all, mut notes) = (Vec::new(), Vec::new());
        for text in children {
            let path = format!("{dir}/{text}");
            match layout::child(&text) {
                Child::Place { mark, owned, order } => all.push(One { path, mark, owned, order, read: None }),
                Child::Back(mark) => notes.push((path, mark)),
                Child::Other => {}
            }
        }
        // Two of other clients may have the same number after an administrator's hand: any order will do, if it is one.
        all.sort_by(|a, b| (a.order, &a.path).cmp(&(b.order, &b.path)));
        let here: HashSet<Mark> = all.iter().filter_map(|one: &One| one.mark).collect();
        let (kept, orphans): (Vec<_>, Vec<_>) = notes.into_iter().partition(|(_, mark)| here.contains(mark));
        let notes = kept.into_iter().map(|(_, mark)| mark).collect();
        Line { name: name.clone(), all, backs: Vec::new(), orphans, notes, changed }
    }

    /// The place of a node in it.
    pub fn place(&self, path: &str) -> Option<usize> {
        self.all.iter().position(|one| one.path == path)
    }

    /// Whether this one holds: it was told so; or all that anybody can know of it is that it is the first.
    pub fn holds(&self, one: &One) -> bool {
        match one.entry().map(|entry| entry.state) {
            Some(State::Granted) => true,
            Some(State::Waiting) => false,
            Some(State::Asked) | None => {
                self.all.first().is_some_and(|first| first.path == one.path) && !self.is_kept_from(one)
            }
        }
    }

    /// Whether others hold the lock in a way that the first in line cannot share. They came later, and entered the lock again past the line.
    fn is_kept_from(&self, first: &One) -> bool {
        let granted = self.all.iter().filter(|one| one.is(State::Granted)).enumerate();
        // Holds of one owner share a fence; of the others all that matters is that their fences differ.
        let mut owners = HashMap::new();
        let mut fence = |i: usize, one: &One| {
            let number = one.owner().map_or(i, |owner| *owners.entry(owner).or_insert(i));
            Fence::new(number as u64 + 1).unwrap_or(Fence::MAX)
        };
        let stakes =
            granted.map(|(i, one)| Stake { owner: one.owner(), mode: one.mode(), fence: fence(i, one) });
        !first.is_foreign() && judge(None, first.mode(), stakes) != Verdict::Free
    }

    pub fn holders(&self) -> impl Iterator<Item = &One> {
        self.all.iter().filter(|one| self.holds(one))
    }

    /// Those who wait. One that does not want to wait is on its way out.
    pub fn waiters(&self) -> impl Iterator<Item = &One> {
        self.all.iter().filter(|one| !self.holds(one) && !one.entry().is_some_and(|entry| entry.hasty))
    }

    /// What holders have in it.
    pub fn stakes<'a>(&'a self, base: u64, but: &'a str) -> impl Iterator<Item = Stake> + 'a {
        let held = self.holders().filter(move |one| one.path != but).map(move |one| Stake {
            owner: one.owner(),
            mode: one.mode(),
            fence: one.fence(base),
        });
        let kept = self.backs.iter().filter_map(Back::held);
        held.chain(kept.map(|held| Stake { owner: None, mode: held.mode, fence: held.fence }))
    }
}
