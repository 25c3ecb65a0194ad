//! What the scripts write down, read back: holds and asks.

use std::time::Duration;

use lockkeeper_core::{Ask, Fence, Held, Holder, LockName, Mode, Queued, Wall};

/// A hold as it stands in a lock's record.
#[derive(Clone, Debug)]
pub struct Hold {
    fence: u64,
    expires_ms: u64,
    /// When it began.
    pub since_us: u64,
    delay_ms: u32,
    mode: u32,
    flags: u8,
    info: Vec<u8>,
    /// Why it was revoked, if it was.
    reason: Option<String>,
}

const PENDING: u8 = 1;
const LINGERING: u8 = 2;
const DELAY: u8 = 4;
/// Added to the flags of a revoked hold, whose reason stands behind everything else.
const REVOKED: u8 = 8;

/// The field beside those of a holder for the names of the same grant in other hash slots.
const OTHER_NAMES: &str = "other_names";

/// How a mode is written: 0 exclusive, 1 shared, one more than the number of permits otherwise.
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

/// Reads one thing after another; `None` as soon as something is not as it should be.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
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

    fn names(&mut self) -> Option<()> {
        let len = self.small()?;
        self.take(len as usize).map(|_| ())
    }

    fn info(&mut self) -> Option<&'a [u8]> {
        let len = u16::from_be_bytes(self.take(2)?.try_into().ok()?);
        self.take(len.into())
    }
}

/// A hold as the scripts store it: `HOLD` in `lua/common.lua`. `None` if it is something else, which a lock key of another
/// client is.
pub fn hold(packed: &[u8]) -> Option<Hold> {
    let mut reader = Reader(packed);
    let (_attempt, flags) = (reader.text()?, reader.take(1)?[0]);
    let (fence, expires_ms, since_us) = (reader.number()?, reader.number()?, reader.number()?);
    let (_stays, _owner) = (reader.number()?, reader.text()?);
    let (_ttl, delay_ms, mode) = (reader.small()?, reader.small()?, reader.small()?);
    reader.names()?;
    let info = reader.info()?.to_vec();
    let reason = match flags & REVOKED {
        0 => None,
        _ => Some(String::from_utf8_lossy(reader.take(reader.0.len())?).into_owned()),
    };
    let flags = flags & !REVOKED;
    reader.0.is_empty().then_some(Hold { fence, expires_ms, since_us, delay_ms, mode, flags, info, reason })
}

impl Hold {
    /// What others may see of it at `now_ms`; `None` if it is over, or only a delay.
    pub fn view(&self, now_ms: u64) -> Option<Held> {
        (self.flags != DELAY && self.expires_ms > now_ms).then(|| Held {
            holder: holder(&self.info),
            fence: Fence::new(self.fence).unwrap_or(Fence::MAX),
            mode: mode_of(self.mode),
            since: Wall::from_micros(self.since_us),
            expires_in_ms: self.expires_ms - now_ms,
            lingering: self.flags == LINGERING,
            revoked: self.reason.clone(),
        })
    }

    /// The names of the same grant that are in other hash slots of a cluster.
    pub fn other_names(&self) -> Vec<LockName> {
        let info: serde_json::Value = serde_json::from_slice(&self.info).unwrap_or_default();
        let names = info.get(OTHER_NAMES).and_then(serde_json::Value::as_array);
        let names = names.into_iter().flatten().filter_map(serde_json::Value::as_str);
        names.filter_map(|name| LockName::new(name).ok()).collect()
    }

    /// For how much longer nobody is let in, if nothing but that is left of the hold.
    pub fn delayed_after(&self, now_ms: u64) -> Option<u64> {
        let ends = match self.flags {
            DELAY => self.expires_ms,
            0 | PENDING if self.expires_ms <= now_ms => self.expires_ms + u64::from(self.delay_ms),
            _ => return None,
        };
        ends.checked_sub(now_ms).filter(|left| *left > 0)
    }
}

/// An ask in line, as others may see it.
pub fn queued(packed: &[u8]) -> Option<Queued> {
    // The first byte is for the scripts alone.
    let mut reader = Reader(packed.get(1..).unwrap_or_default());
    let (since, _hold) = (reader.number()?, reader.number()?);
    let (_attempt, _owner) = (reader.text()?, reader.text()?);
    let (_ttl, _delay, mode) = (reader.small()?, reader.small()?, reader.small()?);
    reader.names()?;
    Some(Queued { holder: holder(reader.info()?), mode: mode_of(mode), since: Wall::from_micros(since) })
}

/// What an ask is ready to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// To be told that it is busy.
    Hasty = 0,
    /// To stand in line.
    Patient = 1,
    /// It stood in line, and was called.
    Called = 2,
}

/// What only the script needs to know of an ask: what its record begins with if it is granted at once, what it is ready
/// to do, how many names it has, its minimum, the fence it is to be raised to, its generation.
pub fn head(ask: &Ask, keys: &[String], stage: Stage, raise: Option<Fence>, generation: u8) -> Vec<u8> {
    let mut head = Vec::with_capacity(16);
    head.extend([mark(ask, keys), stage as u8, keys.len() as u8]);
    head.extend(small(ask.min_hold));
    head.extend((raise.map_or(0, Fence::get) as f64).to_be_bytes());
    head.push(generation);
    head
}

/// The terms of a lock request, which the scripts store unchanged: owner, ttl, delay, mode, names, holder.
///
/// A request that is the part of one slot names the `others`, in the same record as its holder: a revoke finds them there.
pub fn terms(ask: &Ask, keys: &[String], others: &[LockName]) -> Vec<u8> {
    let mut terms = Vec::with_capacity(160);
    match ask.owner {
        Some(owner) => terms.extend(owner.to_hex().into_bytes()),
        None => terms.extend([b'-'; 32]),
    }
    terms.extend(small(ask.ttl));
    terms.extend(small(ask.lock_delay));
    terms.extend(mode_code(ask.mode).to_be_bytes());
    let names = pack_names(keys);
    terms.extend((names.len() as u32).to_be_bytes());
    terms.extend(names);
    let info = info(ask, others);
    terms.extend((info.len() as u16).to_be_bytes());
    terms.extend(info);
    terms
}

fn info(ask: &Ask, others: &[LockName]) -> Vec<u8> {
    let holder = || serde_json::to_vec(&*ask.holder).unwrap_or_default();
    if others.is_empty() {
        return holder();
    }
    let mut info = serde_json::to_value(&*ask.holder).unwrap_or_default();
    info[OTHER_NAMES] = others.iter().map(|name| name.as_str()).collect();
    let info = serde_json::to_vec(&info).unwrap_or_default();
    // Its length has two bytes. Without the names a revoke reaches the other slots with the holder's next renewal.
    if u16::try_from(info.len()).is_ok() { info } else { holder() }
}

fn small(time: Duration) -> [u8; 4] {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX).to_be_bytes()
}

/// `P` if it is alone and nothing of it outlasts a release: then a release needs to know no more.
fn mark(ask: &Ask, keys: &[String]) -> u8 {
    let plain = ask.mode == Mode::Exclusive && ask.owner.is_none() && keys.len() == 1;
    if plain && ask.lock_delay.is_zero() && ask.min_hold.is_zero() { b'P' } else { b'X' }
}

/// Several keys in one text, each with its length before it; nothing for one, which is known anyway.
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

pub fn holder(info: &[u8]) -> Holder {
    serde_json::from_slice(info).unwrap_or_else(|_| somebody_else())
}

/// Whoever took the lock with another client, of whom nothing is known.
pub fn somebody_else() -> Holder {
    Holder { host: "unknown".into(), pid: 0, label: Some("another Redis client".into()) }
}
