//! The queue of a lock as etcd stores it: one key for each holder and waiter, ordered by creation revision.

use lockkeeper_core::admission::ActiveHold;
use lockkeeper_core::{Fence, Holder, HolderView, LockName, Mode, Owner, WaiterView, WallTime};
use lockkeeper_store_kit::admission::AdmissionEntry;

use crate::codec::{EntryState, EntryValue, GRANTED_PREFIX, WAITING_PREFIX};
use crate::keys::{self, KeyId, Keys};
use crate::proto::{Kv, RangeResponse};

/// One key in the queue of a name: a holder, a waiter or a lock-delay.
#[derive(Clone, Debug)]
pub struct QueueEntry {
    pub key: Vec<u8>,
    /// The hash of its attempt, if Lockkeeper wrote the key.
    pub attempt: Option<KeyId>,
    /// The last part of its key: the hash of the attempt, or a slot.
    pub key_id: Option<KeyId>,
    pub created: i64,
    pub modified: i64,
    pub lease: i64,
    /// `None`: written by a foreign client such as `etcdctl lock`. A foreign entry holds the lock when it is the
    /// oldest.
    pub value: Option<EntryValue>,
}

impl QueueEntry {
    pub fn read(keys: &Keys, name: &LockName, kv: Kv) -> Option<QueueEntry> {
        let (whose, rest) = keys.parse_entry_key(&kv.key)?;
        if whose != *name {
            return None;
        }
        let key_id = keys::parse_key_id(rest);
        let value: Option<EntryValue> = key_id.and_then(|_| serde_json::from_slice(&kv.value).ok());
        let stored_attempt = value.as_ref().and_then(|value| keys::parse_key_id(value.attempt.as_ref()?));
        let (created, modified, lease) = (kv.create_revision, kv.mod_revision, kv.lease);
        Some(QueueEntry {
            attempt: stored_attempt.or(key_id),
            key_id,
            created,
            modified,
            lease,
            value,
            key: kv.key,
        })
    }

    pub fn is(&self, state: EntryState) -> bool {
        self.value.as_ref().is_some_and(|value| value.state == state)
    }

    pub fn has_owner(&self) -> bool {
        self.value.as_ref().is_some_and(|value| value.owner.is_some())
    }

    /// The hold for the rule of admission.
    pub fn active_hold(&self, base: u64) -> ActiveHold {
        ActiveHold {
            owner: if self.is(EntryState::Lingering) { None } else { self.owner() },
            mode: self.mode(),
            fence: self.fence(base),
        }
    }

    fn holder(&self) -> Holder {
        match &self.value {
            Some(value) => value.holder.clone(),
            None => {
                let label = Some("foreign client".to_owned());
                Holder { host: format!("etcd lease {:x}", self.lease), pid: 0, label }
            }
        }
    }

    pub fn holder_view(&self, base: u64, expires_in_ms: u64) -> HolderView {
        HolderView {
            holder: self.holder(),
            fence: self.fence(base),
            mode: self.mode(),
            since: self.value.as_ref().map_or(WallTime::default(), |value| value.since_us),
            expires_in_ms,
            lingering: self.is(EntryState::Lingering),
            revoked: self.revoked().map(str::to_owned),
        }
    }

    pub fn waiter_view(&self) -> WaiterView {
        WaiterView {
            holder: self.holder(),
            mode: self.mode(),
            since: self.value.as_ref().map_or(WallTime::default(), |value| value.since_us),
        }
    }
}

impl AdmissionEntry for QueueEntry {
    fn attempt(&self) -> Option<KeyId> {
        self.attempt
    }

    fn owner(&self) -> Option<Owner> {
        Owner::from_hex(self.value.as_ref()?.owner.as_ref()?).ok()
    }

    fn mode(&self) -> Mode {
        self.value.as_ref().map_or(Mode::Exclusive, |value| value.mode)
    }

    fn fence(&self, base: u64) -> Fence {
        let counted = || Fence::new(base.saturating_add(self.modified as u64)).unwrap_or(Fence::MAX);
        self.value.as_ref().and_then(|value| value.fence).unwrap_or_else(counted)
    }

    fn is_waiting(&self) -> bool {
        self.is(EntryState::Waiting)
    }

    fn is_foreign(&self) -> bool {
        self.value.is_none()
    }

    fn revoked(&self) -> Option<&str> {
        self.value.as_ref().filter(|value| value.state == EntryState::Granted)?.revoked.as_deref()
    }
}

/// The queue of one name, the oldest entry first.
#[derive(Clone, Debug)]
pub struct QueueSnapshot {
    pub name: LockName,
    pub all: Vec<QueueEntry>,
    /// How many entries were not read: they are in the middle of a long queue.
    pub unread: usize,
    /// Every entry that is not a waiter was read.
    holders_read: bool,
    /// Every lock-delay was read.
    delays_read: bool,
    /// The oldest entry was read.
    oldest_read: bool,
    /// The keys at the end of the queue, if all of them were parsed.
    end: Vec<Vec<u8>>,
}

impl QueueSnapshot {
    /// Parses the whole queue, or the part of it that sorts first by value.
    pub fn read(keys: &Keys, name: &LockName, range: RangeResponse) -> QueueSnapshot {
        let unread = usize::try_from(range.count).unwrap_or(0).saturating_sub(range.kvs.len());
        let read_up_to = |value: &[u8]| range.kvs.last().is_some_and(|kv| kv.value.as_slice() >= value);
        let (holders_read, delays_read) = (read_up_to(WAITING_PREFIX), read_up_to(GRANTED_PREFIX));
        let mut all: Vec<QueueEntry> =
            range.kvs.into_iter().filter_map(|kv| QueueEntry::read(keys, name, kv)).collect();
        all.sort_by_key(|entry| entry.created);
        let (name, oldest_read, end) = (name.clone(), false, Vec::new());
        QueueSnapshot { name, all, unread, holders_read, delays_read, oldest_read, end }
    }

    /// Adds the last two entries, or the last two up to this request's own.
    pub fn add(&mut self, keys: &Keys, range: RangeResponse) {
        let count = range.kvs.len();
        let last: Vec<QueueEntry> =
            range.kvs.into_iter().filter_map(|kv| QueueEntry::read(keys, &self.name, kv)).collect();
        if last.len() == count {
            self.end = last.iter().map(|entry| entry.key.clone()).collect();
        }
        self.add_entries(last);
    }

    /// Adds the oldest entry.
    pub fn add_oldest(&mut self, keys: &Keys, range: RangeResponse) {
        let oldest = range.kvs.into_iter().next().and_then(|kv| QueueEntry::read(keys, &self.name, kv));
        self.oldest_read = oldest.is_some();
        self.add_entries(oldest);
    }

    /// Adds entries that were read by their keys.
    pub fn add_found(&mut self, keys: &Keys, range: RangeResponse) {
        let found: Vec<_> =
            range.kvs.into_iter().filter_map(|kv| QueueEntry::read(keys, &self.name, kv)).collect();
        self.add_entries(found);
    }

    fn add_entries(&mut self, entries: impl IntoIterator<Item = QueueEntry>) {
        for entry in entries {
            if self.all.iter().all(|known| known.key != entry.key) {
                self.all.push(entry);
                self.unread = self.unread.saturating_sub(1);
            }
        }
        self.all.sort_by_key(|entry| entry.created);
    }

    /// Whether every holder and every lock-delay is known.
    pub fn knows_holders(&self) -> bool {
        self.unread == 0 || self.holders_read
    }

    /// Whether the predecessor of this attempt is known. `is_queued`: the request is queued even if the read did not show
    /// it.
    pub fn knows_predecessor(&self, attempt: &KeyId, is_queued: bool) -> bool {
        let known = self.entry_of(attempt).map(|entry| self.end.contains(&entry.key));
        self.unread == 0 || known.unwrap_or(!is_queued)
    }

    /// Whether every lock-delay is known.
    pub fn knows_delays(&self) -> bool {
        self.unread == 0 || self.delays_read
    }

    /// Whether the oldest entry is known: a grant in a key slot is the oldest of its queue.
    pub fn knows_oldest(&self) -> bool {
        self.unread == 0 || self.oldest_read
    }

    /// The entry right before that of this attempt; the last entry if the attempt has none. `None`: it is not known, or there is none.
    pub fn predecessor(&self, attempt: &KeyId) -> Option<&QueueEntry> {
        let own = self.entry_of(attempt);
        if own.is_some_and(|own| !self.end.contains(&own.key)) {
            return None;
        }
        let own_position = own.map_or(i64::MAX, |own| own.created);
        let at_end = |entry: &&QueueEntry| self.end.contains(&entry.key);
        self.all.iter().filter(at_end).rfind(|entry| entry.created < own_position)
    }

    /// Whether the entry of this attempt is known to be the oldest.
    pub fn is_first(&self, attempt: &KeyId) -> bool {
        self.entry_of(attempt).is_some_and(|own| self.end == [own.key.as_slice()])
    }

    pub fn entry_of(&self, attempt: &KeyId) -> Option<&QueueEntry> {
        self.all.iter().find(|entry| entry.attempt.as_ref() == Some(attempt))
    }

    /// Whether the entry holds the lock: its state says so, or it is foreign and the oldest.
    pub fn holds(&self, entry: &QueueEntry) -> bool {
        match &entry.value {
            Some(value) => matches!(value.state, EntryState::Granted | EntryState::Lingering),
            None => self.all.first().is_some_and(|first| first.key == entry.key),
        }
    }

    pub fn holders(&self) -> impl Iterator<Item = &QueueEntry> {
        self.all.iter().filter(|entry| self.holds(entry))
    }

    pub fn waiters(&self) -> impl Iterator<Item = &QueueEntry> {
        self.all.iter().filter(|entry| !self.holds(entry) && !entry.is(EntryState::Delayed))
    }
}
