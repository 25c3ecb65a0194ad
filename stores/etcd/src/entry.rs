//! What is written under a key of a lock, and the line that these keys make up.

use lockkeeper_core::rules::Stake;
use lockkeeper_core::{Ask, Attempt, Fence, Held, Holder, LockName, Mode, Owner, Queued, Wall};
use serde::{Deserialize, Serialize};

use crate::layout::{self, Layout, Mark};
use crate::proto::{Kv, RangeResponse};

/// What the value of every queued request begins with. The values of all other states sort before it, so that etcd finds those
/// without reading a long queue.
const WAITING: &[u8] = br#"{"state":"waiting""#;

/// Where an ask has got to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// It stands in line.
    #[serde(rename = "waiting")]
    Waiting,
    /// It holds.
    #[serde(rename = "granted")]
    Granted,
    /// Released, and kept only for the rest of its minimum hold.
    #[serde(rename = "lingering")]
    Lingering,
    /// It ended uncleanly, and the lock is held back.
    #[serde(rename = "delayed")]
    Delayed,
}

/// The value of a key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    pub state: State,
    pub mode: Mode,
    /// The owner's mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Whose it is, if its key is not called after its attempt but after a seat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<String>,
    /// Only if it is another one than what the key's last revision says: of a hold that is a re-entry, or that was
    /// written again since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    pub ttl_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lock_delay_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_hold_ms: u64,
    pub since_us: Wall,
    pub holder: Holder,
    /// Why its holder is to give it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<String>,
    /// All names, if there are several: under the first of them. Under the others stands the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<LockName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<LockName>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Entry {
    pub fn new(ask: &Ask, state: State, fence: Option<Fence>, now: Wall) -> Self {
        let millis = |d: std::time::Duration| d.as_millis() as u64;
        Entry {
            state,
            mode: ask.mode,
            owner: ask.owner.as_ref().map(|owner| layout::owner_mark(owner).to_hex()),
            attempt: None,
            fence,
            ttl_ms: millis(ask.ttl),
            lock_delay_ms: millis(ask.lock_delay),
            min_hold_ms: millis(ask.min_hold),
            since_us: now,
            holder: (*ask.holder).clone(),
            revoked: None,
            names: Vec::new(),
            first: None,
        }
    }

    /// As it stands under a key that is not called after its attempt.
    pub fn of(self, mark: &Mark) -> Self {
        Entry { attempt: Some(Attempt::from_bytes(*mark).to_hex()), ..self }
    }

    /// As it stands under one of its names.
    pub fn under(&self, name: &LockName, names: &[LockName]) -> Vec<u8> {
        if names.len() == 1 {
            return self.to_bytes();
        }
        let mut entry = self.clone();
        (entry.names, entry.first) = match &names[0] {
            first if first == name => (names.to_vec(), None),
            first => (Vec::new(), Some(first.clone())),
        };
        entry.to_bytes()
    }

    /// As it is, in another state.
    pub fn in_state(&self, state: State, fence: Fence) -> Vec<u8> {
        Entry { state, fence: Some(fence), ..self.clone() }.to_bytes()
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Somebody in the line of a name, holders included.
#[derive(Clone, Debug)]
pub struct One {
    pub key: Vec<u8>,
    /// Of its attempt, if it is one of ours.
    pub mark: Option<Mark>,
    /// What its key is called after: the same, or a seat.
    pub place: Option<Mark>,
    pub created: i64,
    pub written: i64,
    pub lease: i64,
    /// `None`: somebody else's, as `etcdctl lock` writes it. It holds when it is the oldest.
    pub entry: Option<Entry>,
}

impl One {
    pub fn read(layout: &Layout, name: &LockName, kv: Kv) -> Option<One> {
        let (whose, rest) = layout.name(&kv.key)?;
        if whose != *name {
            return None;
        }
        let place = layout::mark_in(rest);
        let entry: Option<Entry> = place.and_then(|_| serde_json::from_slice(&kv.value).ok());
        let seated = entry.as_ref().and_then(|entry| layout::mark_in(entry.attempt.as_ref()?));
        let (created, written, lease) = (kv.create_revision, kv.mod_revision, kv.lease);
        Some(One { mark: seated.or(place), place, created, written, lease, entry, key: kv.key })
    }

    pub fn is(&self, state: State) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.state == state)
    }

    pub fn is_foreign(&self) -> bool {
        self.entry.is_none()
    }

    pub fn fence(&self, base: u64) -> Fence {
        let counted = || Fence::new(base.saturating_add(self.written as u64)).unwrap_or(Fence::MAX);
        self.entry.as_ref().and_then(|entry| entry.fence).unwrap_or_else(counted)
    }

    pub fn owner(&self) -> Option<Owner> {
        Owner::from_hex(self.entry.as_ref()?.owner.as_ref()?).ok()
    }

    /// What it has in the lock, if it holds.
    pub fn stake(&self, base: u64) -> Stake {
        Stake {
            owner: if self.is(State::Lingering) { None } else { self.owner() },
            mode: self.entry.as_ref().map_or(Mode::Exclusive, |entry| entry.mode),
            fence: self.fence(base),
        }
    }

    fn holder(&self) -> Holder {
        match &self.entry {
            Some(entry) => entry.holder.clone(),
            None => {
                let label = Some("somebody else's client".to_owned());
                Holder { host: format!("etcd lease {:x}", self.lease), pid: 0, label }
            }
        }
    }

    pub fn held(&self, base: u64, expires_in_ms: u64) -> Held {
        Held {
            holder: self.holder(),
            fence: self.fence(base),
            mode: self.entry.as_ref().map_or(Mode::Exclusive, |entry| entry.mode),
            since: self.entry.as_ref().map_or(Wall::default(), |entry| entry.since_us),
            expires_in_ms,
            lingering: self.is(State::Lingering),
            revoked: self.revoked().map(str::to_owned),
        }
    }

    pub fn queued(&self) -> Queued {
        Queued {
            holder: self.holder(),
            mode: self.entry.as_ref().map_or(Mode::Exclusive, |entry| entry.mode),
            since: self.entry.as_ref().map_or(Wall::default(), |entry| entry.since_us),
        }
    }
}

/// The line of one name, the oldest first.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: LockName,
    pub all: Vec<One>,
    /// How many more there are, that were not read: they stand in the middle of a long line.
    pub unread: usize,
    /// Every key that is not that of a queued request was read.
    holders_read: bool,
    /// The keys that were read of the end of the line, if nothing else stands between them.
    end: Vec<Vec<u8>>,
}

impl Line {
    /// Reads all of it, or the part of it that sorts first by value.
    pub fn read(layout: &Layout, name: &LockName, range: RangeResponse) -> Line {
        let unread = usize::try_from(range.count).unwrap_or(0).saturating_sub(range.kvs.len());
        let holders_read = unread == 0 || range.kvs.last().is_some_and(|kv| kv.value.as_slice() >= WAITING);
        let mut all: Vec<One> = range.kvs.into_iter().filter_map(|kv| One::read(layout, name, kv)).collect();
        all.sort_by_key(|one| one.created);
        Line { name: name.clone(), all, unread, holders_read, end: Vec::new() }
    }

    /// Adds the last two keys, or the last two up to our own.
    pub fn add(&mut self, layout: &Layout, range: RangeResponse) {
        let count = range.kvs.len();
        let last: Vec<One> =
            range.kvs.into_iter().filter_map(|kv| One::read(layout, &self.name, kv)).collect();
        if last.len() == count {
            self.end = last.iter().map(|one| one.key.clone()).collect();
        }
        for one in last {
            if self.all.iter().all(|known| known.key != one.key) {
                self.all.push(one);
                self.unread = self.unread.saturating_sub(1);
            }
        }
        self.all.sort_by_key(|one| one.created);
    }

    /// Whether everything is known that holds, or holds the lock back.
    pub fn knows_holders(&self) -> bool {
        self.unread == 0 || self.holders_read
    }

    /// Whether it is known who stands right before this one. `joins`: it stands in line, also if it was not read.
    pub fn knows_before(&self, mark: &Mark, joins: bool) -> bool {
        let known = self.mine(mark).map(|one| self.end.contains(&one.key));
        self.unread == 0 || known.unwrap_or(!joins)
    }

    pub fn mine(&self, mark: &Mark) -> Option<&One> {
        self.all.iter().find(|one| one.mark.as_ref() == Some(mark))
    }

    /// Whether this one holds: it was told so, or it is somebody else's and the oldest of all.
    pub fn holds(&self, one: &One) -> bool {
        match &one.entry {
            Some(entry) => matches!(entry.state, State::Granted | State::Lingering),
            None => self.all.first().is_some_and(|first| first.key == one.key),
        }
    }

    pub fn holders(&self) -> impl Iterator<Item = &One> {
        self.all.iter().filter(|one| self.holds(one))
    }

    pub fn waiters(&self) -> impl Iterator<Item = &One> {
        self.all.iter().filter(|one| !self.holds(one) && !one.is(State::Delayed))
    }

    /// Those who hold, other than this one.
    pub fn other_holders<'a>(&'a self, but: &'a Mark) -> impl Iterator<Item = &'a One> {
        self.holders().filter(move |one| one.mark.as_ref() != Some(but))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn queued_requests_sort_behind_everything_that_holds() {
        let holder = Arc::new(Holder::new("host", 1, None).unwrap());
        let name = LockName::new("x").unwrap();
        let ask =
            Ask::new(Attempt::from_bytes([7; 16]), name.clone(), std::time::Duration::from_secs(30), holder);
        let value =
            |state| Entry::new(&ask, state, None, Wall::default()).under(&name, std::slice::from_ref(&name));
        assert!(value(State::Waiting).starts_with(WAITING));
        for state in [State::Granted, State::Lingering, State::Delayed] {
            assert!(value(state).as_slice() < WAITING, "{state:?}");
        }
    }
}
