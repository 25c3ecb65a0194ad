//! What a node says about a lock, read back.

use lockkeeper_core::{Fence, Held, Holder, Mode, Wall};
use redis::Value;

/// A lock at one node, as others may see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Tells one holder from another.
    pub by: u64,
    /// For how much longer, in milliseconds.
    pub left_ms: u64,
    /// What our own clients write beside it; `None`: another client has it.
    pub ours: Option<Ours>,
}

/// What our own clients write beside a lock.
#[derive(Clone, Debug, PartialEq)]
pub struct Ours {
    /// 0 while it is not chosen.
    fence: u64,
    since: Wall,
    /// Why it was revoked, if it was.
    reason: Option<String>,
    info: Vec<u8>,
}

impl Seen {
    /// From what `seen` in `common.lua` gives.
    pub fn read(value: &Value) -> Option<Seen> {
        let Value::Array(parts) = value else { return None };
        let [Value::BulkString(hash), Value::Int(left), Value::BulkString(shown)] = &parts[..] else {
            return None;
        };
        let hash = std::str::from_utf8(hash).ok()?;
        let by = u64::from_str_radix(hash.get(..16)?, 16).ok()?;
        // A key without an end is somebody's who wants it for ever.
        let left_ms = u64::try_from(*left).unwrap_or(u64::MAX);
        Some(Seen { by, left_ms, ours: Ours::read(shown) })
    }
}

impl Ours {
    fn read(shown: &[u8]) -> Option<Ours> {
        let mut parts = shown.splitn(3, |byte| *byte == b' ');
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
        let (fence, since) = (number()?, Wall::from_micros(number()?));
        let (reason, info) = split_reason(parts.next()?);
        Some(Ours { fence, since, reason, info: info.to_vec() })
    }
}

/// `!LENGTH:REASON` before the holder of a revoked grant, as `common.lua` writes it.
fn split_reason(text: &[u8]) -> (Option<String>, &[u8]) {
    let split = || {
        let (length, rest) =
            text.strip_prefix(b"!")?.split_at_checked(text.iter().position(|b| *b == b':')? - 1)?;
        let length = std::str::from_utf8(length).ok()?.parse().ok()?;
        let (reason, info) = rest.strip_prefix(b":")?.split_at_checked(length)?;
        Some((Some(String::from_utf8_lossy(reason).into_owned()), info))
    };
    split().unwrap_or((None, text))
}

/// One holder, put together from what several nodes say of it. `quorum`: with fewer nodes than that it is over.
pub fn held(of: &[&Seen], quorum: usize) -> Held {
    let mut left: Vec<u64> = of.iter().map(|seen| seen.left_ms).collect();
    left.sort_unstable_by(|a, b| b.cmp(a));
    let ours = of.iter().filter_map(|seen| seen.ours.as_ref()).max_by_key(|ours| ours.fence);
    Held {
        holder: ours.map_or_else(somebody_else, |ours| holder(&ours.info)),
        // Without a fence the smallest there is: whoever checks fences lets nothing of it pass.
        fence: ours.and_then(|ours| Fence::new(ours.fence).ok()).unwrap_or(Fence::MIN),
        mode: Mode::Exclusive,
        since: ours.map(|ours| ours.since).unwrap_or_default(),
        expires_in_ms: left.get(quorum - 1).or(left.last()).copied().unwrap_or(0),
        lingering: false,
        revoked: of.iter().filter_map(|seen| seen.ours.as_ref()).find_map(|ours| ours.reason.clone()),
    }
}

/// The holder with the most nodes, and how many these are.
pub fn leader<'a>(all: impl Iterator<Item = &'a Seen>) -> Vec<&'a Seen> {
    let all: Vec<&Seen> = all.collect();
    let of = |by: u64| all.iter().copied().filter(move |seen| seen.by == by);
    all.iter().max_by_key(|seen| of(seen.by).count()).map(|seen| of(seen.by).collect()).unwrap_or_default()
}

/// What we write about whoever asks.
pub fn info(holder: &Holder) -> Vec<u8> {
    serde_json::to_vec(holder).unwrap_or_default()
}

fn holder(info: &[u8]) -> Holder {
    serde_json::from_slice(info).unwrap_or_else(|_| somebody_else())
}

/// Whoever took the lock with another client, of whom nothing is known.
fn somebody_else() -> Holder {
    Holder { host: "unknown".into(), pid: 0, label: Some("another Redis client".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(by: u64, left_ms: u64, fence: Option<u64>) -> Seen {
        let ours =
            fence.map(|fence| Ours { fence, since: Wall::from_micros(5), reason: None, info: Vec::new() });
        Seen { by, left_ms, ours }
    }

    #[test]
    fn a_holder_is_put_together_from_its_nodes() {
        let all = [seen(1, 500, Some(0)), seen(2, 9, None), seen(1, 300, Some(77)), seen(1, 400, Some(77))];
        let first = leader(all.iter());
        assert_eq!(first.len(), 3);
        let view = held(&first, 2);
        assert_eq!((view.fence.get(), view.expires_in_ms), (77, 400), "with one node less it is over");
        assert_eq!(held(&leader(all[1..2].iter()), 2).fence, Fence::MIN);
        assert!(leader([].iter()).is_empty());
    }

    #[test]
    fn the_reason_of_a_revoke_is_split_from_the_holder() {
        let read = |text: &str| Ours::read(text.as_bytes()).unwrap();
        let revoked = read(r#"7 5 !11:drained: {}{"host":"a","pid":1}"#);
        assert_eq!(revoked.reason.as_deref(), Some("drained: {}"));
        assert_eq!(holder(&revoked.info).host, "a");
        let plain = read(r#"7 5 {"host":"a","pid":1}"#);
        assert_eq!((plain.reason, holder(&plain.info).host.as_str()), (None, "a"));
    }
}
