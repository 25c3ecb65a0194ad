//! The JSON that is stored in queue entries, hold-back nodes and event nodes, and the version of all stored formats.

use std::time::Duration;

use lockkeeper_core::{Fence, Holder, LockName, LockRequest, Mode, Wait, WallTime};
use lockkeeper_store_kit::hash_owner;
use serde::{Deserialize, Serialize};

/// The version of all stored formats: node names, queue entries, hold-back nodes, events and records. It is written in
/// the node `=format`. Change it with anything that programs of the previous version cannot read; `tests/golden.rs` fails
/// if the stored bytes change and this does not.
pub const FORMAT: &str = "1";

/// The state of a request in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RequestState {
    /// It holds the lock if it is the first entry, as the entry of any other client does; otherwise it waits.
    Queued,
    /// It waits until its state is written as granted: it has several names, an owner or a minimum hold, or a client
    /// watches.
    Waiting,
    /// It holds the lock.
    Granted,
}

/// The content of a queue entry's node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoredRequest {
    pub state: RequestState,
    pub mode: Mode,
    /// The hash of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// For a re-entry: the fence that its owner has already. All other fences come from the zxid of the node's last
    /// write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    /// The request does not wait: if it is not granted at once, its client deletes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_wait: bool,
    pub ttl_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lock_delay_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_hold_ms: u64,
    pub since_us: WallTime,
    pub holder: Holder,
    /// The reason of a revocation: the holder must release the lock, and the lease is not renewed any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<String>,
    /// All names of a request that has several, in the node under the first of them. The other nodes contain the first
    /// name.
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

impl StoredRequest {
    pub fn new(request: &LockRequest, state: RequestState, fence: Option<Fence>, now: WallTime) -> Self {
        StoredRequest {
            state,
            mode: request.mode,
            owner: request.owner.as_ref().map(|owner| hash_owner(owner).to_hex()),
            fence,
            no_wait: request.wait == Wait::No,
            ttl_ms: millis(request.ttl),
            lock_delay_ms: millis(request.lock_delay),
            min_hold_ms: millis(request.min_hold),
            since_us: now,
            holder: (*request.holder).clone(),
            revoked: None,
            names: Vec::new(),
            first: None,
        }
    }

    /// The content of the node under `name`, one of `names`.
    pub fn under(&self, name: &LockName, names: &[LockName]) -> Vec<u8> {
        let mut stored = self.clone();
        (stored.names, stored.first) = match names {
            [_] => (Vec::new(), None),
            [first, ..] if first == name => (names.to_vec(), None),
            _ => (Vec::new(), Some(names[0].clone())),
        };
        serde_json::to_vec(&stored).unwrap_or_default()
    }
}

impl StoredRequest {
    /// The content of a holder's node after a revocation. The fence is stored because rewriting the node changes its
    /// zxid.
    pub fn revoked(&self, fence: Fence, reason: &str) -> Vec<u8> {
        let (fence, revoked) = (Some(fence), Some(reason.to_owned()));
        serde_json::to_vec(&StoredRequest { fence, revoked, ..self.clone() }).unwrap_or_default()
    }
}

/// Why a lock is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HoldBackKind {
    /// Not yet: the holder's node exists. When that node disappears without a release, the hold-back begins as soon as
    /// a client notices.
    Pending,
    /// The hold ended without a release.
    Delayed,
    /// The holder released the lock, which stays held until its minimum hold is over.
    Lingering,
}

/// The content of a hold-back node. The node stays when the session of the holder ends, and keeps the lock from the
/// next request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HoldBackNode {
    pub kind: HoldBackKind,
    /// How long the lock is held back, from the last write of the node.
    pub duration_ms: u64,
    /// The request has a lock-delay: a late release does not end the hold-back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lock_delay: bool,
    /// A part of the duration is the rest of a lease. Until its end the holder may still use the lock.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub covers_lease: bool,
    pub mode: Mode,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    pub since_us: WallTime,
    pub holder: Holder,
}

impl HoldBackNode {
    /// The node for a hold that has ended.
    pub fn of(stored: &StoredRequest, kind: HoldBackKind, duration_ms: u64, fence: Option<Fence>) -> Vec<u8> {
        let (mode, since_us, holder) = (stored.mode, stored.since_us, stored.holder.clone());
        let lock_delay = stored.lock_delay_ms > 0;
        HoldBackNode { kind, duration_ms, lock_delay, covers_lease: false, mode, fence, since_us, holder }
            .to_bytes()
    }

    /// The node for a grant whose ttl may exceed the trusted part of its session by `rest_ms`.
    pub fn of_lease(stored: &StoredRequest, rest_ms: u64) -> Vec<u8> {
        let (mode, since_us, holder, lock_delay) =
            (stored.mode, stored.since_us, stored.holder.clone(), stored.lock_delay_ms > 0);
        let (duration_ms, covers_lease) = (rest_ms.saturating_add(stored.lock_delay_ms), rest_ms > 0);
        HoldBackNode {
            kind: HoldBackKind::Pending,
            duration_ms,
            lock_delay,
            covers_lease,
            mode,
            fence: None,
            since_us,
            holder,
        }
        .to_bytes()
    }

    /// The same content with another kind.
    pub fn of_kind(&self, kind: HoldBackKind) -> Vec<u8> {
        HoldBackNode { kind, ..self.clone() }.to_bytes()
    }

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventTag {
    Granted,
    Released,
    Expired,
    Broken,
    Revoked,
    Waiting,
    Left,
}

/// The content of an event node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoredEvent {
    pub name: LockName,
    #[serde(rename = "event")]
    pub tag: EventTag,
    /// The fence, if it is not made from the zxid of the event node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
}
