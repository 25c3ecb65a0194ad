//! The stored values: of a lock's key, as JSON, and of the fence base, with the version of the format. A change of the
//! format changes `FORMAT` and the golden fixture.

use lockkeeper_core::{Attempt, Error, Fence, Holder, LockName, LockRequest, Mode, Result, WallTime};
use lockkeeper_store_kit::hash_owner;
use serde::{Deserialize, Serialize};

use crate::keys::KeyId;
use crate::proto::Kv;

/// The first bytes of every waiting entry's value. The values of all other states sort before it, so etcd can find
/// holders by value without reading a long queue.
pub const WAITING_PREFIX: &[u8] = br#"{"state":"waiting""#;

/// The first bytes of every granted entry's value. Lock-delays sort before it, and other states of this store after it.
pub const GRANTED_PREFIX: &[u8] = br#"{"state":"granted""#;

/// The state of a stored request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryState {
    /// The request is queued.
    #[serde(rename = "waiting")]
    Waiting,
    /// The request holds the lock.
    #[serde(rename = "granted")]
    Granted,
    /// The hold was released, and stays for the rest of its minimum hold.
    #[serde(rename = "lingering")]
    Lingering,
    /// The hold ended without a release, and its lock-delay runs.
    #[serde(rename = "delayed")]
    Delayed,
}

/// The value of one key of a lock.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EntryValue {
    pub state: EntryState,
    pub mode: Mode,
    /// The hash of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The hash of the attempt, if the key is a slot and not named after the attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<String>,
    /// Stored only if it differs from the fence of the key's last write: for a re-entry, and for a hold whose key was
    /// written again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    pub ttl_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lock_delay_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_hold_ms: u64,
    pub since_us: WallTime,
    pub holder: Holder,
    /// Why an operator revoked the hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<String>,
    /// Under the first name of a grant of several: all names. Under the others: only the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<LockName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<LockName>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl EntryValue {
    pub fn new(request: &LockRequest, state: EntryState, fence: Option<Fence>, now: WallTime) -> Self {
        let millis = |d: std::time::Duration| d.as_millis() as u64;
        EntryValue {
            state,
            mode: request.mode,
            owner: request.owner.as_ref().map(|owner| hash_owner(owner).to_hex()),
            attempt: None,
            fence,
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

    /// The value for a key slot, which is not named after the attempt.
    pub fn with_attempt(self, attempt: &KeyId) -> Self {
        EntryValue { attempt: Some(Attempt::from_bytes(*attempt).to_hex()), ..self }
    }

    /// The stored bytes under one of the request's names.
    pub fn value_under(&self, name: &LockName, names: &[LockName]) -> Vec<u8> {
        if names.len() == 1 {
            return self.to_bytes();
        }
        let mut value = self.clone();
        (value.names, value.first) = match &names[0] {
            first if first == name => (names.to_vec(), None),
            first => (Vec::new(), Some(first.clone())),
        };
        value.to_bytes()
    }

    /// The stored bytes in another state.
    pub fn in_state(&self, state: EntryState, fence: Fence) -> Vec<u8> {
        EntryValue { state, fence: Some(fence), ..self.clone() }.to_bytes()
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The version of everything that is stored below the prefix. It is part of the value that every granting transaction
/// compares, so processes of two versions never grant beside each other.
const FORMAT: &str = "v1 ";

pub fn encode_base(base: u64) -> Vec<u8> {
    format!("{FORMAT}{base}").into_bytes()
}

pub fn decode_base(kv: &Kv) -> Result<u64> {
    let text = std::str::from_utf8(&kv.value).ok();
    let number = text.and_then(|text| text.strip_prefix(FORMAT)?.parse::<u64>().ok());
    number.filter(|base| *base < 1 << 53).ok_or_else(|| {
        Error::Invalid(format!(
            "the key {:?} does not have the value that this version of Lockkeeper writes: another version or another \
             program uses this prefix. Use another prefix",
            String::from_utf8_lossy(&kv.key)
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lockkeeper_store_kit::hash_attempt;

    use super::*;

    #[test]
    fn waiting_values_sort_behind_all_others() {
        let holder = Arc::new(Holder::new("host", 1, None).unwrap());
        let name = LockName::new("x").unwrap();
        let request = LockRequest::new(
            Attempt::from_bytes([7; 16]),
            name.clone(),
            std::time::Duration::from_secs(30),
            holder,
        );
        let value = |state| {
            EntryValue::new(&request, state, None, WallTime::default())
                .value_under(&name, std::slice::from_ref(&name))
        };
        assert!(value(EntryState::Waiting).starts_with(WAITING_PREFIX));
        for state in [EntryState::Granted, EntryState::Lingering, EntryState::Delayed] {
            assert!(value(state).as_slice() < WAITING_PREFIX, "{state:?}");
        }
        assert!(value(EntryState::Granted).starts_with(GRANTED_PREFIX));
        assert!(value(EntryState::Delayed).as_slice() < GRANTED_PREFIX);
    }

    /// If this fails, the stored format has changed: raise `FORMAT`, and add a fixture.
    #[test]
    fn written_values_match_the_golden_fixture() {
        let holder = Arc::new(Holder::new("host", 1, Some("label".into())).unwrap());
        let name = LockName::new("golden").unwrap();
        let ttl = std::time::Duration::from_secs(30);
        let request = LockRequest::new(Attempt::from_bytes([7; 16]), name.clone(), ttl, holder);
        let golden = [
            (EntryState::Granted, include_str!("../tests/golden/v1-granted.json")),
            (EntryState::Waiting, include_str!("../tests/golden/v1-waiting.json")),
        ];
        for (state, golden) in golden {
            let value = EntryValue::new(&request, state, None, WallTime::from_micros(1_700_000_000_000_000));
            let bytes = value.value_under(&name, std::slice::from_ref(&name));
            assert_eq!(String::from_utf8(bytes).unwrap(), golden.trim_end());
        }
    }

    /// One key of each kind that `v1-granted.json` and `v1-waiting.json` do not have, as `KEY VALUE`: what this version writes.
    #[test]
    fn each_kind_of_value_matches_the_golden_fixture() {
        let holder = Arc::new(Holder::new("host", 1, Some("label".into())).unwrap());
        let name = |text: &str| LockName::new(text).unwrap();
        let ttl = std::time::Duration::from_secs(30);
        let fence = Fence::new(1_700_000_000_000_001).unwrap();
        let id = |byte| Attempt::from_bytes(hash_attempt(&Attempt::from_bytes([byte; 16]))).to_hex();
        let mut request = LockRequest::new(Attempt::from_bytes([7; 16]), name("x"), ttl, holder);
        let value = |request: &LockRequest, fence| {
            EntryValue::new(request, EntryState::Granted, fence, WallTime::from_micros(1_700_000_000_000_000))
        };
        let mut lines = Vec::new();
        let mut add = |key: &str, id: String, value: Vec<u8>| {
            lines.push(format!("lock/{key}/{id} {}", String::from_utf8(value).unwrap()));
        };
        let plain = value(&request, None);
        let several = [name("several/a"), name("several/b")];
        for text in &several {
            add(text.as_str(), id(7), plain.value_under(text, &several));
        }
        add(
            "slot",
            "05".repeat(16),
            plain.clone().with_attempt(&hash_attempt(&request.key.attempt)).to_bytes(),
        );
        add(
            "revoked",
            id(7),
            EntryValue { fence: Some(fence), revoked: Some("maintenance".into()), ..plain }.to_bytes(),
        );
        request.owner = Some(lockkeeper_core::Owner::from_bytes([9; 16]));
        add("owned", id(7), value(&request, Some(fence)).to_bytes());
        request.owner = None;
        request.mode = Mode::Permit(3);
        add("counted", id(7), value(&request, None).to_bytes());
        request.mode = Mode::Shared;
        add("shared", id(7), value(&request, None).to_bytes());
        add("shared", id(8), value(&request, None).to_bytes());
        request.mode = Mode::Exclusive;
        (request.lock_delay, request.min_hold) = (ttl * 2, ttl);
        let ended = value(&request, None);
        add("delayed", id(7), ended.in_state(EntryState::Delayed, fence));
        add("lingering", id(7), ended.in_state(EntryState::Lingering, fence));
        let written = lines.join("\n") + "\n";
        if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
            std::fs::write("tests/golden/v1-kinds.txt", &written).unwrap();
        }
        assert_eq!(written, include_str!("../tests/golden/v1-kinds.txt"));
    }
}
