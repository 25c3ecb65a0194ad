//! The queue of one name as it was read: holders and waiters in order.

use std::collections::{HashMap, HashSet};

use lockkeeper_core::admission::{ActiveHold, Admission, evaluate};
use lockkeeper_core::{Fence, Holder, HolderView, LockName, Mode, Owner, WaiterView, WallTime};
use lockkeeper_store_kit::AttemptHash;
use lockkeeper_store_kit::admission::AdmissionEntry;
use zookeeper_client::Stat;

use crate::codec::{HoldBackKind, HoldBackNode, RequestState, StoredRequest};
use crate::keys::{self, NodeKind};

/// One entry of a queue, a holder or a waiter.
#[derive(Clone, Debug)]
pub struct QueueEntry {
    pub path: String,
    pub hash: Option<AttemptHash>,
    pub owned: bool,
    pub sequence: u64,
    /// The content that was read from its node. `None`: the node was not read.
    pub content: Option<NodeContent>,
}

#[derive(Clone, Debug)]
pub struct NodeContent {
    /// `None`: the node of a foreign client, such as Curator.
    pub stored: Option<StoredRequest>,
    pub stat: Stat,
}

impl QueueEntry {
    pub fn stored(&self) -> Option<&StoredRequest> {
        self.content.as_ref()?.stored.as_ref()
    }

    pub fn is_in(&self, state: RequestState) -> bool {
        self.stored().is_some_and(|stored| stored.state == state)
    }

    /// The zxid of the write that was read.
    pub fn written_zxid(&self) -> Option<i64> {
        self.content.as_ref().map(|read| read.stat.mzxid)
    }

    fn holder(&self) -> Holder {
        match self.stored() {
            Some(stored) => stored.holder.clone(),
            None => {
                let session = self.content.as_ref().map_or(0, |read| read.stat.ephemeral_owner);
                let label = Some("a client of another library".to_owned());
                Holder { host: format!("ZooKeeper session {session:#x}"), pid: 0, label }
            }
        }
    }

    fn since(&self) -> WallTime {
        let time = self.content.as_ref().map_or(0, |read| read.stat.ctime.unsigned_abs());
        self.stored().map_or(WallTime::from_micros(time.saturating_mul(1000)), |stored| stored.since_us)
    }

    pub fn holder_view(&self, base: u64) -> HolderView {
        HolderView {
            holder: self.holder(),
            fence: self.fence(base),
            mode: self.mode(),
            since: self.since(),
            expires_in_ms: self.stored().map_or(1, |stored| stored.ttl_ms),
            lingering: false,
            revoked: self.revoked().map(str::to_owned),
        }
    }

    pub fn waiter_view(&self) -> WaiterView {
        WaiterView { holder: self.holder(), mode: self.mode(), since: self.since() }
    }
}

impl AdmissionEntry for QueueEntry {
    fn attempt(&self) -> Option<AttemptHash> {
        self.hash
    }

    fn owner(&self) -> Option<Owner> {
        Owner::from_hex(self.stored()?.owner.as_ref()?).ok()
    }

    fn mode(&self) -> Mode {
        self.stored().map_or(Mode::Exclusive, |stored| stored.mode)
    }

    fn fence(&self, base: u64) -> Fence {
        let zxid = self.content.as_ref().map_or(0, |read| read.stat.mzxid.unsigned_abs());
        let counted = || Fence::new(base.saturating_add(zxid)).unwrap_or(Fence::MAX);
        self.stored().and_then(|stored| stored.fence).unwrap_or_else(counted)
    }

    fn is_waiting(&self) -> bool {
        self.is_in(RequestState::Waiting)
    }

    fn is_foreign(&self) -> bool {
        self.hash.is_none() || self.content.as_ref().is_some_and(|read| read.stored.is_none())
    }

    fn revoked(&self) -> Option<&str> {
        self.stored()?.revoked.as_deref()
    }
}

/// A hold-back node that keeps the lock from the next request.
#[derive(Clone, Debug)]
pub struct HoldBack {
    pub path: String,
    /// `None`: its content is not in a known format.
    pub node: Option<HoldBackNode>,
    /// For how many more milliseconds.
    pub left_ms: u64,
}

impl HoldBack {
    pub fn lingers(&self) -> bool {
        self.node.as_ref().is_some_and(|node| node.kind == HoldBackKind::Lingering)
    }

    /// Whether its holder may still use the lock.
    pub fn is_lease(&self) -> bool {
        self.node.as_ref().is_some_and(|node| node.covers_lease)
    }

    pub fn holder_view(&self) -> Option<HolderView> {
        let node = self.node.as_ref().filter(|node| node.kind == HoldBackKind::Lingering)?;
        Some(HolderView {
            holder: node.holder.clone(),
            fence: node.fence?,
            mode: node.mode,
            since: node.since_us,
            expires_in_ms: self.left_ms,
            lingering: true,
            revoked: None,
        })
    }
}

/// The queue of one name, the oldest entry first.
#[derive(Clone, Debug)]
pub struct QueueSnapshot {
    pub name: LockName,
    pub entries: Vec<QueueEntry>,
    /// The hold-back nodes that apply now.
    pub hold_backs: Vec<HoldBack>,
    /// The hold-back nodes without an entry, before they are read.
    pub orphans: Vec<(String, AttemptHash)>,
    /// The attempts in the queue that have a hold-back node.
    pub hold_back_hashes: HashSet<AttemptHash>,
    /// The zxid of the last change of the queue node's children.
    pub children_zxid: i64,
    /// How many of the first entries hold the lock and share it, though not all of them were read.
    pub sharers_ahead: usize,
}

impl QueueSnapshot {
    pub fn new(name: &LockName, dir: &str, children: Vec<String>, children_zxid: i64) -> QueueSnapshot {
        let (mut entries, mut hold_backs) = (Vec::new(), Vec::new());
        for text in children {
            let path = format!("{dir}/{text}");
            match keys::node_kind(&text) {
                NodeKind::Entry { hash, owned, sequence } => {
                    entries.push(QueueEntry { path, hash, owned, sequence, content: None })
                }
                NodeKind::HoldBack(hash) => hold_backs.push((path, hash)),
                NodeKind::Other => {}
            }
        }
        // Entries of foreign clients may have the same number after an administrator has recreated nodes. Any order
        // will do if all clients use it.
        entries.sort_by(|a, b| (a.sequence, &a.path).cmp(&(b.sequence, &b.path)));
        let present: HashSet<AttemptHash> =
            entries.iter().filter_map(|entry: &QueueEntry| entry.hash).collect();
        let (kept, orphans): (Vec<_>, Vec<_>) =
            hold_backs.into_iter().partition(|(_, hash)| present.contains(hash));
        let hold_back_hashes = kept.into_iter().map(|(_, hash)| hash).collect();
        QueueSnapshot {
            name: name.clone(),
            entries,
            hold_backs: Vec::new(),
            orphans,
            hold_back_hashes,
            children_zxid,
            sharers_ahead: 0,
        }
    }

    /// Concludes from the entry at `nearest`, the nearest one ahead of a request that has no owner, about all entries before it. The first
    /// entry, and all with an owner, were read. Returns whether that decides a request of this mode.
    ///
    /// If the entry waits, the request waits behind it, unless it re-enters. If it holds and shares, it was granted by the same rule: no waiter
    /// was ahead of it, and every holder shared. That is still so: no entry is inserted before another one, and while it holds, an exclusive
    /// hold could only be a re-entry of an exclusive hold. Hold-backs are another matter. A counted request has to count the holders.
    pub fn conclude_from(&mut self, nearest: usize, mode: Mode) -> bool {
        if nearest == 0 {
            return true;
        }
        // A foreign client holds by its position alone.
        let ours = self.entries[..=nearest].iter().all(|entry| entry.hash.is_some());
        match self.entries[nearest].stored().filter(|_| ours).map(|stored| (stored.state, stored.mode)) {
            Some((RequestState::Waiting | RequestState::Queued, _)) => true,
            Some((RequestState::Granted, Mode::Shared)) if mode == Mode::Shared => {
                self.sharers_ahead = nearest + 1;
                true
            }
            // It is not a hold of this owner, so it blocks an exclusive request.
            Some((RequestState::Granted, _)) => mode == Mode::Exclusive,
            None => false,
        }
    }

    /// The position of a node.
    pub fn position(&self, path: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.path == path)
    }

    /// Whether an entry holds the lock: it is written as granted; or its position alone decides, and it is the first.
    pub fn holds(&self, entry: &QueueEntry) -> bool {
        match entry.stored().map(|stored| stored.state) {
            Some(RequestState::Granted) => true,
            Some(RequestState::Waiting) => false,
            Some(RequestState::Queued) | None => {
                self.entries.first().is_some_and(|first| first.path == entry.path) && !self.is_excluded(entry)
            }
        }
    }

    /// Whether the first entry is blocked by a hold that it cannot share: a re-entry that was enqueued later and
    /// passed it. Or such a hold has ended, and an exclusive hold-back remains.
    fn is_excluded(&self, first: &QueueEntry) -> bool {
        let granted = self.entries.iter().filter(|entry| entry.is_in(RequestState::Granted)).enumerate();
        // Holds of one owner share a fence. For all others it only matters that the fences differ.
        let mut owners = HashMap::new();
        let mut fence = |i: usize, entry: &QueueEntry| {
            let number = entry.owner().map_or(i, |owner| *owners.entry(owner).or_insert(i));
            Fence::new(number as u64 + 1).unwrap_or(Fence::MAX)
        };
        let active_holds = granted.map(|(i, entry)| ActiveHold {
            owner: entry.owner(),
            mode: entry.mode(),
            fence: fence(i, entry),
        });
        let is_exclusive =
            |hold_back: &HoldBack| hold_back.node.as_ref().is_some_and(|node| node.mode == Mode::Exclusive);
        let excluded_by_holds = || evaluate(None, first.mode(), active_holds) != Admission::Free;
        !first.is_foreign() && (self.hold_backs.iter().any(is_exclusive) || excluded_by_holds())
    }

    pub fn holders(&self) -> impl Iterator<Item = &QueueEntry> {
        self.entries.iter().filter(|entry| self.holds(entry))
    }

    /// The waiters. A request that does not wait is about to be deleted by its client.
    pub fn waiters(&self) -> impl Iterator<Item = &QueueEntry> {
        self.entries
            .iter()
            .filter(|entry| !self.holds(entry) && !entry.stored().is_some_and(|stored| stored.no_wait))
    }
}

/// One node of a holder.
pub struct HolderNode {
    pub name: LockName,
    pub entry: QueueEntry,
    /// A hold-back node exists for it.
    pub has_hold_back: bool,
}
