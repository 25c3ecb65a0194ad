//! The item of a lock, between DynamoDB's attributes and structs: the holds, and what else keeps a request from the lock.

use std::collections::BTreeMap;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use lockkeeper_core::admission::ActiveHold;
use lockkeeper_core::{Error, Fence, Holder, HolderView, LockName, Mode, Owner, Result, WallTime};
use serde::{Deserialize, Serialize};

use crate::attributes::{AttributeMap, FENCE, FORMAT, KEY, LOCK_STATE, REV, number, number_of, text_of};

/// The version of the stored format, of locks and of records. A client neither reads nor writes an item of another version.
/// `tests/golden/` has a lock state of this version.
pub const FORMAT_VERSION: u64 = 2;

/// A duration that starts at a write. It has elapsed for an observer that has seen the same revision for that long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredTimer {
    /// The write that started or restarted it.
    pub revision: u64,
    pub ms: u64,
    /// The end by the wall clock: for views only.
    pub ends_us: u64,
}

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredHold {
    /// The hash of the attempt that holds. Empty once the hold is released and lingers for its min-hold.
    pub attempt_hash: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    pub mode: Mode,
    pub fence: Fence,
    /// The ttl; for a lingering hold the rest of its min-hold.
    pub lease: StoredTimer,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lock_delay_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_hold_ms: u64,
    pub since: WallTime,
    pub holder: Holder,
    /// All names of the grant, if it has several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<LockName>,
    /// The write that revoked it: the key of its reason in [`LockState::revoke_reasons`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<u64>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl StoredHold {
    /// Whether the hold is released and kept only for the rest of its min-hold.
    pub fn is_lingering(&self) -> bool {
        self.attempt_hash.is_empty()
    }

    pub fn active_hold(&self) -> ActiveHold {
        let owner = self.owner.as_deref().and_then(|hex| Owner::from_hex(hex).ok());
        ActiveHold { owner, mode: self.mode, fence: self.fence }
    }

    /// The public view, without the reason of a revoke.
    pub fn view(&self, wall: WallTime) -> HolderView {
        let left = self.lease.ends_us.saturating_sub(wall.as_micros()) / 1000;
        HolderView {
            holder: self.holder.clone(),
            fence: self.fence,
            mode: self.mode,
            since: self.since,
            expires_in_ms: left.min(self.lease.ms),
            lingering: self.is_lingering(),
            revoked: None,
        }
    }
}

/// A waiter's mark that it wants the lock exclusively: no new shared holder is admitted while it lasts. It serves fairness
/// only, so it may go by the wall clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExclusiveIntent {
    pub attempt_hash: String,
    pub ends_us: u64,
}

/// A note in the item that a process has observed it. The processes of one boot of one machine share a clock, so each of them
/// may count from the moment in the note. This is how jobs that never wait get the lock of a dead holder in the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedObservation {
    pub boot: String,
    /// The moment on the clock of that boot.
    pub at_ns: u64,
    /// The same on the wall clock. An observer takes the smaller age of the two, because copies of a virtual machine share a boot.
    pub at_us: u64,
    /// The revision of the item then.
    pub revision: u64,
}

/// The state of a lock: the value of the attribute `lock_state`, as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockState {
    /// Oldest first; re-entrant holds of one owner beside each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<StoredHold>,
    /// The lock-delay after a holder ended without a release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock_delay: Option<StoredTimer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive_intent: Option<ExclusiveIntent>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub observations: Vec<SharedObservation>,
    /// Why holds were revoked, by the write that revoked them. Stored once for all holds, because an item has little room.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub revoke_reasons: BTreeMap<u64, String>,
}

impl LockState {
    pub fn find(&self, attempt_hash: &str) -> Option<&StoredHold> {
        self.holds.iter().find(|hold| hold.attempt_hash == attempt_hash)
    }

    /// All timers of the lock: the leases and the lock-delay.
    pub fn timers(&self) -> impl Iterator<Item = &StoredTimer> {
        self.holds.iter().map(|hold| &hold.lease).chain(&self.lock_delay)
    }

    /// Adds a hold beside the others of its grant, because the rule of admission counts owners by adjacent fences.
    pub fn add(&mut self, hold: StoredHold) {
        let beside = self.holds.iter().rposition(|other| other.fence == hold.fence);
        self.holds.insert(beside.map_or(self.holds.len(), |i| i + 1), hold);
    }

    /// Why a hold was revoked, if it was.
    pub fn revoke_reason(&self, hold: &StoredHold) -> Option<&str> {
        self.revoke_reasons.get(&hold.revoked?).map(String::as_str)
    }

    /// Removes the reasons that no hold refers to.
    pub fn remove_unused_reasons(&mut self) {
        let holds = &self.holds;
        self.revoke_reasons.retain(|write, _| holds.iter().any(|hold| hold.revoked == Some(*write)));
    }
}

/// The item of a lock, decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockItem {
    /// The number of the last write; `None`: the item does not exist.
    pub revision: Option<u64>,
    /// The highest fence of this lock. It stays when no hold is left.
    pub fence: Option<Fence>,
    pub state: LockState,
}

impl LockItem {
    /// # Errors
    /// [`Error::Unsupported`] if another program or another version of the format wrote the item.
    pub fn decode(item: Option<&AttributeMap>) -> Result<LockItem> {
        let Some(item) = item else { return Ok(LockItem::default()) };
        check_format(item)?;
        let fence = match number_of(item, FENCE) {
            Some(n) => Some(Fence::new(n)?),
            None => None,
        };
        let state = match text_of(item, LOCK_STATE) {
            Some(text) => {
                serde_json::from_str(text).map_err(|error| unsupported_item(item, &error.to_string()))?
            }
            None => LockState::default(),
        };
        let revision = number_of(item, REV).ok_or_else(|| unsupported_item(item, "its revision"))?;
        Ok(LockItem { revision: Some(revision), fence, state })
    }

    /// The item as write number `revision`.
    pub fn encode(&self, key: String, revision: u64) -> Result<AttributeMap> {
        let mut item = new_item(key, revision);
        if let Some(fence) = self.fence {
            item.insert(FENCE.into(), number(fence.get()));
        }
        if self.state != LockState::default() {
            let text = serde_json::to_string(&self.state)
                .map_err(|error| Error::Invalid(format!("the holder cannot be encoded: {error}")))?;
            item.insert(LOCK_STATE.into(), AttributeValue::S(text));
        }
        Ok(item)
    }
}

/// An item with its key, its revision and the version of the format.
pub fn new_item(key: String, revision: u64) -> AttributeMap {
    AttributeMap::from([
        (KEY.to_owned(), AttributeValue::S(key)),
        (REV.to_owned(), number(revision)),
        (FORMAT.to_owned(), number(FORMAT_VERSION)),
    ])
}

/// # Errors
/// [`Error::Unsupported`] if the item is not of [`FORMAT_VERSION`].
pub fn check_format(item: &AttributeMap) -> Result<()> {
    if number_of(item, FORMAT) == Some(FORMAT_VERSION) {
        Ok(())
    } else {
        Err(unsupported_item(item, "its format"))
    }
}

fn unsupported_item(item: &AttributeMap, cause: &str) -> Error {
    let key = text_of(item, KEY).unwrap_or_default();
    Error::Unsupported(format!("this version does not understand the item {key:?} ({cause})"))
}

pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The same, rounded up: a stored lease must not end before the lease that the holder counts.
pub fn millis_up(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The attribute `lock_state` as version 2 of the format writes it. If the bytes must change, raise [`FORMAT_VERSION`] and add a file.
    const GOLDEN: &str = include_str!("../tests/golden/lock_state_v2.json");

    fn state() -> LockState {
        let timer = StoredTimer { revision: 9, ms: 30_000, ends_us: 1_030_000_000 };
        let hold = StoredHold {
            attempt_hash: "00112233445566778899aabbccddeeff".into(),
            owner: Some("ffeeddccbbaa99887766554433221100".into()),
            mode: Mode::Shared,
            fence: Fence::new(77).unwrap(),
            lease: timer.clone(),
            lock_delay_ms: 5000,
            min_hold_ms: 1000,
            since: WallTime::from_micros(1_000_000_000),
            holder: Holder::new("host", 42, Some("a job".into())).unwrap(),
            names: vec![LockName::new("a").unwrap(), LockName::new("b").unwrap()],
            revoked: Some(9),
        };
        let observed = SharedObservation { boot: "boot".into(), at_ns: 5, at_us: 6, revision: 9 };
        let attempt_hash = hold.attempt_hash.clone();
        LockState {
            holds: vec![hold],
            lock_delay: Some(timer),
            exclusive_intent: Some(ExclusiveIntent { attempt_hash, ends_us: 7 }),
            observations: vec![observed],
            revoke_reasons: BTreeMap::from([(9, "drained".into())]),
        }
    }

    #[test]
    fn version_2_of_the_lock_state_is_read_and_written_as_it_was() {
        assert_eq!(FORMAT_VERSION, 2);
        assert_eq!(serde_json::to_string(&state()).unwrap(), GOLDEN.trim());
        assert_eq!(serde_json::from_str::<LockState>(GOLDEN).unwrap(), state());
    }
}
