//! The reply of a node about a lock, decoded.

use lockkeeper_core::{Fence, Holder, HolderView, Mode, WallTime};
use redis::Value;

/// A lock at one node, as others may see it.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeLock {
    /// A hash that identifies the holder.
    pub by: u64,
    /// For how much longer, in milliseconds.
    pub left_ms: u64,
    /// The metadata of a Lockkeeper client; `None`: another Redlock client holds the lock.
    pub metadata: Option<NodeMetadata>,
}

/// The metadata that Lockkeeper clients write beside a lock.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeMetadata {
    /// 0 while it is not chosen.
    fence: u64,
    since: WallTime,
    /// Why it was revoked, if it was.
    reason: Option<String>,
    info: Vec<u8>,
}

impl NodeLock {
    /// Decodes the reply of `seen` in `common.lua`.
    pub fn read(value: &Value) -> Option<NodeLock> {
        let Value::Array(parts) = value else { return None };
        let [Value::BulkString(hash), Value::Int(left), Value::BulkString(shown)] = &parts[..] else {
            return None;
        };
        let hash = std::str::from_utf8(hash).ok()?;
        let by = u64::from_str_radix(hash.get(..16)?, 16).ok()?;
        // Another client has set a key without an expiry: it does not end.
        let left_ms = u64::try_from(*left).unwrap_or(u64::MAX);
        Some(NodeLock { by, left_ms, metadata: NodeMetadata::read(shown) })
    }
}

impl NodeMetadata {
    fn read(shown: &[u8]) -> Option<NodeMetadata> {
        let mut parts = shown.splitn(3, |byte| *byte == b' ');
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
        let (fence, since) = (number()?, WallTime::from_micros(number()?));
        let (reason, info) = split_reason(parts.next()?);
        Some(NodeMetadata { fence, since, reason, info: info.to_vec() })
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

/// The view of one holder, from the replies of several nodes. Its lease ends when fewer than `quorum` nodes have the key.
pub fn holder_view(of: &[&NodeLock], quorum: usize) -> HolderView {
    let mut left: Vec<u64> = of.iter().map(|seen| seen.left_ms).collect();
    left.sort_unstable_by(|a, b| b.cmp(a));
    let metadata = of.iter().filter_map(|seen| seen.metadata.as_ref()).max_by_key(|metadata| metadata.fence);
    HolderView {
        holder: metadata.map_or_else(foreign_holder, |metadata| holder(&metadata.info)),
        // A lock without a fence gets the smallest one, which a resource that checks fences rejects.
        fence: metadata.and_then(|metadata| Fence::new(metadata.fence).ok()).unwrap_or(Fence::MIN),
        mode: Mode::Exclusive,
        since: metadata.map(|metadata| metadata.since).unwrap_or_default(),
        expires_in_ms: left.get(quorum - 1).or(left.last()).copied().unwrap_or(0),
        lingering: false,
        revoked: of
            .iter()
            .filter_map(|seen| seen.metadata.as_ref())
            .find_map(|metadata| metadata.reason.clone()),
    }
}

/// The holder with the most nodes, and how many these are.
pub fn leader<'a>(all: impl Iterator<Item = &'a NodeLock>) -> Vec<&'a NodeLock> {
    let all: Vec<&NodeLock> = all.collect();
    let of = |by: u64| all.iter().copied().filter(move |seen| seen.by == by);
    all.iter().max_by_key(|seen| of(seen.by).count()).map(|seen| of(seen.by).collect()).unwrap_or_default()
}

/// The metadata of the holder, as JSON.
pub fn info(holder: &Holder) -> Vec<u8> {
    serde_json::to_vec(holder).unwrap_or_default()
}

fn holder(info: &[u8]) -> Holder {
    serde_json::from_slice(info).unwrap_or_else(|_| foreign_holder())
}

/// The holder of a lock that another Redlock client has taken.
fn foreign_holder() -> Holder {
    Holder { host: "unknown".into(), pid: 0, label: Some("another Redis client".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(by: u64, left_ms: u64, fence: Option<u64>) -> NodeLock {
        let metadata = fence.map(|fence| NodeMetadata {
            fence,
            since: WallTime::from_micros(5),
            reason: None,
            info: Vec::new(),
        });
        NodeLock { by, left_ms, metadata }
    }

    #[test]
    fn a_holder_is_put_together_from_its_nodes() {
        let all = [seen(1, 500, Some(0)), seen(2, 9, None), seen(1, 300, Some(77)), seen(1, 400, Some(77))];
        let first = leader(all.iter());
        assert_eq!(first.len(), 3);
        let view = holder_view(&first, 2);
        assert_eq!((view.fence.get(), view.expires_in_ms), (77, 400), "with one node less it is over");
        assert_eq!(holder_view(&leader(all[1..2].iter()), 2).fence, Fence::MIN);
        assert!(leader([].iter()).is_empty());
    }

    #[test]
    fn the_reason_of_a_revoke_is_split_from_the_holder() {
        let read = |text: &str| NodeMetadata::read(text.as_bytes()).unwrap();
        let revoked = read(r#"7 5 !11:drained: {}{"host":"a","pid":1}"#);
        assert_eq!(revoked.reason.as_deref(), Some("drained: {}"));
        assert_eq!(holder(&revoked.info).host, "a");
        let plain = read(r#"7 5 {"host":"a","pid":1}"#);
        assert_eq!((plain.reason, holder(&plain.info).host.as_str()), (None, "a"));
    }
}
