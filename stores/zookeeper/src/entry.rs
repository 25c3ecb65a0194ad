//! What is written in the nodes of a lock.

use std::time::Duration;

use lockkeeper_core::{Ask, Fence, Holder, LockName, Mode, Wait, Wall};
use serde::{Deserialize, Serialize};

use crate::layout;

/// Where an ask has got to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It holds if it is the first in line, as everybody's does that knows no more than that; else it waits.
    Asked,
    /// It waits until it is told: it has several names, or an owner.
    Waiting,
    /// It holds.
    Granted,
}

/// What is in the node of an ask.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    pub state: State,
    pub mode: Mode,
    /// The owner's mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Of a re-entry: the fence that its owner had already. Of all others the node's last write makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    /// It does not wait: if it is not served at once, it is gone at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hasty: bool,
    pub ttl_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lock_delay_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_hold_ms: u64,
    pub since_us: Wall,
    pub holder: Holder,
    /// Why its holder is to give it back: the lock was revoked, and the lease is not renewed any more.
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

pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Entry {
    pub fn new(ask: &Ask, state: State, fence: Option<Fence>, now: Wall) -> Self {
        Entry {
            state,
            mode: ask.mode,
            owner: ask.owner.as_ref().map(|owner| layout::owner_mark(owner).to_hex()),
            fence,
            hasty: ask.wait == Wait::No,
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

    /// As it stands under one of its names.
    pub fn under(&self, name: &LockName, names: &[LockName]) -> Vec<u8> {
        let mut entry = self.clone();
        (entry.names, entry.first) = match names {
            [_] => (Vec::new(), None),
            [first, ..] if first == name => (names.to_vec(), None),
            _ => (Vec::new(), Some(names[0].clone())),
        };
        serde_json::to_vec(&entry).unwrap_or_default()
    }
}

impl Entry {
    /// The same hold, which its holder is to give back. Writing it again does not change its fence.
    pub fn revoked(&self, fence: Fence, reason: &str) -> Vec<u8> {
        let (fence, revoked) = (Some(fence), Some(reason.to_owned()));
        serde_json::to_vec(&Entry { fence, revoked, ..self.clone() }).unwrap_or_default()
    }
}

/// Why a lock is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// It is not, as long as its holder's node is there. When that is gone without a word, it is held back from when
    /// somebody notices.
    Held,
    /// It ended uncleanly.
    Delayed,
    /// It was released, and is kept for the rest of its minimum hold.
    Lingering,
}

/// What is in the node that holds a lock back: it stays when the session of its holder ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Note {
    pub kind: Kind,
    /// For how long, from the node's last write.
    pub ms: u64,
    /// A lock-delay was asked for: an unclean end stays one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub delay: bool,
    /// A part of the time is the rest of a lease: until then its holder may believe that it holds the lock.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lease: bool,
    pub mode: Mode,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    pub since_us: Wall,
    pub holder: Holder,
}

impl Note {
    /// What is written of a grant.
    pub fn of(entry: &Entry, kind: Kind, ms: u64, fence: Option<Fence>) -> Vec<u8> {
        let (mode, since_us, holder) = (entry.mode, entry.since_us, entry.holder.clone());
        let delay = entry.lock_delay_ms > 0;
        Note { kind, ms, delay, lease: false, mode, fence, since_us, holder }.to_bytes()
    }

    /// What is written of a grant whose ttl may be longer than the session lasts: `rest_ms` is by how much.
    pub fn of_lease(entry: &Entry, rest_ms: u64) -> Vec<u8> {
        let (mode, since_us, holder, delay) =
            (entry.mode, entry.since_us, entry.holder.clone(), entry.lock_delay_ms > 0);
        let (ms, lease) = (rest_ms.saturating_add(entry.lock_delay_ms), rest_ms > 0);
        Note { kind: Kind::Held, ms, delay, lease, mode, fence: None, since_us, holder }.to_bytes()
    }

    /// The same, of another kind.
    pub fn of_kind(&self, kind: Kind) -> Vec<u8> {
        Note { kind, ..self.clone() }.to_bytes()
    }

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}
