//! The stored format: holds and queue entries as the scripts write them, and the arguments that the scripts read.
//!
//! `lua/common.lua` has the same layout as `HOLD` and `ENTRY`.

use std::time::Duration;

use lockkeeper_core::{Fence, Holder, HolderView, LockName, LockRequest, Mode, WaiterView, WallTime};
use redis::Value;

/// A hold as the server stores it.
#[derive(Clone, Debug)]
pub struct StoredHold {
    fence: u64,
    expires_ms: u64,
    /// The start of the hold.
    pub since_us: u64,
    delay_ms: u32,
    mode: u32,
    flags: u8,
    /// The lock keys of a grant of several names in one hash slot; empty for one name.
    pub keys: Vec<String>,
    info: Vec<u8>,
    /// The reason of a revoke.
    reason: Option<String>,
}

const PENDING: u8 = 1;
const LINGERING: u8 = 2;
const DELAY: u8 = 4;
/// The version of the stored format: `tests/golden/format-1.txt` has all that it stores. Each layout below has the version in which it
/// was changed last, so that processes of two versions share the others.
const FORMAT: u8 = 1;
/// The version of the layout of holds. It is in the upper four bits of their flags, and in `lua/common.lua`.
const HOLD_FORMAT: u8 = 0;
/// The version of the layout of queue entries. It is in the upper four bits of their first byte, and in `lua/common.lua`. The entries of
/// version 0 had a letter there, which reads as version 5.
const ENTRY_FORMAT: u8 = 1;
const _: () = {
    let (layouts, mut i) = ([HOLD_FORMAT, ENTRY_FORMAT], 0);
    while i < layouts.len() {
        assert!(layouts[i] <= FORMAT, "a layout that was changed is a new format");
        i += 1;
    }
};
/// How far a version is shifted.
const FORMAT_SHIFT: u8 = 4;
/// Added to the flags of a revoked hold. The reason is at the end of the stored value.
const REVOKED: u8 = 8;

/// The field in the holder's JSON that lists the names of the same grant in other hash slots.
const OTHER_NAMES: &str = "other_names";

/// The stored number of a mode: 0 for exclusive, 1 for shared, the number of permits plus one otherwise.
fn mode_code(mode: Mode) -> u32 {
    match mode {
        Mode::Exclusive => 0,
        Mode::Shared => 1,
        Mode::Permit(n) => n + 1,
    }
}

fn mode_of(code: u32) -> Mode {
    match code {
        0 => Mode::Exclusive,
        1 => Mode::Shared,
        n => Mode::Permit(n - 1),
    }
}

/// Reads fields from the front of a stored value; `None` at the first field that does not fit.
struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (part, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(part)
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.take(32)?.to_vec()).ok()
    }

    fn number(&mut self) -> Option<u64> {
        let number = f64::from_be_bytes(self.take(8)?.try_into().ok()?);
        (0.0..9.1e15).contains(&number).then_some(number as u64)
    }

    fn small(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }

    fn names(&mut self) -> Option<Vec<String>> {
        let len = self.small()?;
        let (mut names, mut packed) = (Vec::new(), ByteReader(self.take(len as usize)?));
        while !packed.0.is_empty() {
            names.push(String::from_utf8(packed.info()?.to_vec()).ok()?);
        }
        Some(names)
    }

    fn info(&mut self) -> Option<&'a [u8]> {
        let len = u16::from_be_bytes(self.take(2)?.try_into().ok()?);
        self.take(len.into())
    }
}

/// Decodes a stored hold: `HOLD` in `lua/common.lua`. `None` for the value of another lock client, and for a hold of another
/// format.
pub fn decode_hold(packed: &[u8]) -> Option<StoredHold> {
    let mut reader = ByteReader(packed);
    let (_attempt, flags) = (reader.text()?, reader.take(1)?[0]);
    if flags >> FORMAT_SHIFT != HOLD_FORMAT {
        return None;
    }
    let (fence, expires_ms, since_us) = (reader.number()?, reader.number()?, reader.number()?);
    let (_stays, _owner) = (reader.number()?, reader.text()?);
    let (_ttl, delay_ms, mode) = (reader.small()?, reader.small()?, reader.small()?);
    let keys = reader.names()?;
    let info = reader.info()?.to_vec();
    let reason = match flags & REVOKED {
        0 => None,
        _ => Some(String::from_utf8_lossy(reader.take(reader.0.len())?).into_owned()),
    };
    let flags = flags & !REVOKED;
    reader.0.is_empty().then_some(StoredHold {
        fence,
        expires_ms,
        since_us,
        delay_ms,
        mode,
        flags,
        keys,
        info,
        reason,
    })
}

impl StoredHold {
    /// The public view of the hold at `now_ms`; `None` if it has ended or is only a lock-delay.
    pub fn view(&self, now_ms: u64) -> Option<HolderView> {
        (self.flags != DELAY && self.expires_ms > now_ms).then(|| HolderView {
            holder: decode_holder(&self.info),
            fence: Fence::new(self.fence).unwrap_or(Fence::MAX),
            mode: mode_of(self.mode),
            since: WallTime::from_micros(self.since_us),
            expires_in_ms: self.expires_ms - now_ms,
            lingering: self.flags == LINGERING,
            revoked: self.reason.clone(),
        })
    }

    /// The names of the same grant in other hash slots of a cluster.
    pub fn other_names(&self) -> Vec<LockName> {
        let info: serde_json::Value = serde_json::from_slice(&self.info).unwrap_or_default();
        let names = info.get(OTHER_NAMES).and_then(serde_json::Value::as_array);
        let names = names.into_iter().flatten().filter_map(serde_json::Value::as_str);
        names.filter_map(|name| LockName::new(name).ok()).collect()
    }

    /// For how much longer the lock-delay lasts, if only the lock-delay is left of the hold.
    pub fn delayed_after(&self, now_ms: u64) -> Option<u64> {
        let ends = match self.flags {
            DELAY => self.expires_ms,
            0 | PENDING if self.expires_ms <= now_ms => self.expires_ms + u64::from(self.delay_ms),
            _ => return None,
        };
        ends.checked_sub(now_ms).filter(|left| *left > 0)
    }
}

/// The holds of a lock in the order of their start; `None` stands for the hold of another lock client.
pub(crate) fn stored_holds(values: &[Value]) -> Vec<Option<StoredHold>> {
    let packed = values.iter().filter_map(|value| match value {
        Value::BulkString(packed) if !packed.is_empty() => Some(packed),
        _ => None,
    });
    let mut holds: Vec<_> = packed.map(|packed| decode_hold(packed)).collect();
    holds.sort_by_key(|hold| hold.as_ref().map(|hold| hold.since_us));
    holds
}

/// The public view of the holders of a lock. `pttl`: the time to live of the lock key.
pub(crate) fn holders(holds: &[Option<StoredHold>], pttl: i64, now_ms: u64) -> Vec<HolderView> {
    let another_client = || HolderView {
        holder: foreign_holder(),
        // The other client has no fence. With the lowest one, a resource that checks fences refuses its writes.
        fence: Fence::MIN,
        mode: Mode::Exclusive,
        since: WallTime::from_micros(now_ms * 1000),
        expires_in_ms: u64::try_from(pttl).unwrap_or(0),
        lingering: false,
        revoked: None,
    };
    holds
        .iter()
        .filter_map(|hold| hold.as_ref().map_or_else(|| Some(another_client()), |hold| hold.view(now_ms)))
        .collect()
}

/// The public view of a queue entry at `now_us`; that of another version of Lockkeeper has no details.
pub fn view_waiter(packed: &[u8], now_us: u64) -> WaiterView {
    decode_waiter(packed).unwrap_or_else(|| WaiterView {
        holder: Holder { label: Some("another version of Lockkeeper".into()), ..foreign_holder() },
        mode: Mode::Exclusive,
        since: WallTime::from_micros(now_us),
    })
}

fn decode_waiter(packed: &[u8]) -> Option<WaiterView> {
    let mut reader = ByteReader(packed);
    if reader.take(1)?[0] >> FORMAT_SHIFT != ENTRY_FORMAT {
        return None;
    }
    let (since, _hold) = (reader.number()?, reader.number()?);
    let (_attempt, _owner) = (reader.text()?, reader.text()?);
    let (_ttl, _delay, mode) = (reader.small()?, reader.small()?, reader.small()?);
    reader.names()?;
    Some(WaiterView {
        holder: decode_holder(reader.info()?),
        mode: mode_of(mode),
        since: WallTime::from_micros(since),
    })
}

/// How the acquire script handles a request that it cannot grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireStage {
    /// Returns "busy".
    TryOnce = 0,
    /// Appends the request to the queue.
    Enqueue = 1,
    /// The request was in the queue and was notified of a hand-off: the script confirms it.
    Confirm = 2,
}

/// The arguments of the acquire script for all requests of a batch: the first byte of a queue entry, the stage, the number of names, the minimum hold, the
/// fence to raise the hold to, the generation of the request, and how long the queue entries of this process last without a poll.
pub fn encode_head(
    request: &LockRequest,
    keys: &[String],
    stage: AcquireStage,
    raise: Option<Fence>,
    (generation, entry_life): (u8, Duration),
) -> Vec<u8> {
    let mut head = Vec::with_capacity(20);
    head.extend([entry_kind(request, keys), stage as u8, keys.len() as u8]);
    head.extend(encode_millis(request.min_hold));
    head.extend((raise.map_or(0, Fence::get) as f64).to_be_bytes());
    head.push(generation);
    head.extend(encode_millis(entry_life));
    head
}

/// The terms of a lock request, which the scripts store unchanged: owner, ttl, delay, mode, names, holder.
///
/// A request for the part of a grant that is in one slot lists the `others` in the holder's JSON: a revoke finds them there.
pub fn encode_terms(request: &LockRequest, keys: &[String], others: &[LockName]) -> Vec<u8> {
    let mut terms = Vec::with_capacity(160);
    match request.owner {
        Some(owner) => terms.extend(owner.to_hex().into_bytes()),
        None => terms.extend([b'-'; 32]),
    }
    terms.extend(encode_millis(request.ttl));
    terms.extend(encode_millis(request.lock_delay));
    terms.extend(mode_code(request.mode).to_be_bytes());
    let names = pack_names(keys);
    terms.extend((names.len() as u32).to_be_bytes());
    terms.extend(names);
    let info = encode_holder(request, others);
    terms.extend((info.len() as u16).to_be_bytes());
    terms.extend(info);
    terms
}

fn encode_holder(request: &LockRequest, others: &[LockName]) -> Vec<u8> {
    let holder = || serde_json::to_vec(&*request.holder).unwrap_or_default();
    if others.is_empty() {
        return holder();
    }
    let mut info = serde_json::to_value(&*request.holder).unwrap_or_default();
    info[OTHER_NAMES] = others.iter().map(|name| name.as_str()).collect();
    let info = serde_json::to_vec(&info).unwrap_or_default();
    // The length of the JSON has two bytes. Without the list, a revoke reaches the other slots at the holder's next renewal.
    if u16::try_from(info.len()).is_ok() { info } else { holder() }
}

fn encode_millis(time: Duration) -> [u8; 4] {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX).to_be_bytes()
}

/// The first byte of a queue entry: the version, and 0 for a plain hold: exclusive, one name, no owner, and neither lock-delay nor
/// minimum hold. The fast path of the scripts handles these; 1 for all others.
fn entry_kind(request: &LockRequest, keys: &[String]) -> u8 {
    let plain = request.mode == Mode::Exclusive && request.owner.is_none() && keys.len() == 1;
    let plain = plain && request.lock_delay.is_zero() && request.min_hold.is_zero();
    ENTRY_FORMAT << FORMAT_SHIFT | u8::from(!plain)
}

/// The keys of a request for several names, each behind its length; empty for one name, which the script knows.
fn pack_names(keys: &[String]) -> Vec<u8> {
    let mut packed = Vec::new();
    if keys.len() > 1 {
        for key in keys {
            packed.extend((key.len() as u16).to_be_bytes());
            packed.extend(key.as_bytes());
        }
    }
    packed
}

/// The holder in the stored JSON.
pub fn decode_holder(info: &[u8]) -> Holder {
    serde_json::from_slice(info).unwrap_or_else(|_| foreign_holder())
}

/// The holder that another Redis lock client is shown as.
pub fn foreign_holder() -> Holder {
    Holder { host: "unknown".into(), pid: 0, label: Some("another Redis client".into()) }
}

/// The flags of a release, as `lua/release.lua` reads them.
pub mod release_flags {
    /// A guard exists, although the server has no confirmation of the hand-off yet.
    pub const GUARDED: u8 = 1;
    /// No caller learned of the grant: its minimum hold does not apply.
    pub const UNREPORTED: u8 = 2;
    /// A request of the attempt may still arrive: the script leaves a tombstone.
    pub const UNANSWERED: u8 = 4;
    /// Release only a queue entry or an unconfirmed hold.
    pub const UNCONFIRMED: u8 = 8;
}

/// A release: the attempt, and more behind it only if there is more than one name or any flag.
///
/// `ended`: the newest generation that the tombstone refuses. `limit`: the highest fence that the release applies to, or 0.
pub fn encode_release(attempt: String, names: usize, flags: u8, ended: Option<u8>, limit: u64) -> Vec<u8> {
    let flags = flags | if ended.is_some() { release_flags::UNANSWERED } else { 0 };
    let mut release = attempt.into_bytes();
    if names > 1 || flags != 0 {
        release.extend([flags, names as u8, ended.unwrap_or(0)]);
        release.extend((limit as f64).to_be_bytes());
    }
    release
}

/// The attempt, the flags, the generation and the limit of an encoded release.
pub fn decode_release(release: &[u8]) -> Option<(&str, u8, u8, u64)> {
    let (attempt, more) = release.split_at_checked(32)?;
    let attempt = std::str::from_utf8(attempt).ok()?;
    match more {
        [] => Some((attempt, 0, 0, 0)),
        [flags, _, generation, limit @ ..] => {
            let limit = f64::from_be_bytes(limit.try_into().ok()?) as u64;
            Some((attempt, *flags, *generation, limit))
        }
        _ => None,
    }
}
