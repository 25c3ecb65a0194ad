//! Node names: name and path in both directions. A lock's nodes are those of Curator: under the lock's node, one
//! `_c_GUID-lock-SEQUENCE` for each holder and waiter. Lock names are percent-encoded, so that every name is one node.
//!
//! Nodes that are not locks begin with `=`, which no encoded name does.

use lockkeeper_core::{Attempt, LockName};
use lockkeeper_store_kit::AttemptHash;

fn hex(hash: &AttemptHash) -> String {
    Attempt::from_bytes(*hash).to_hex()
}

const HOLD_BACK: &str = "=hold-back-";

#[derive(Clone, Debug)]
pub struct Keys {
    base: String,
}

impl Keys {
    pub fn new(base: &str) -> Self {
        Keys { base: base.to_owned() }
    }

    /// The node under which everything is stored.
    pub fn root(&self) -> &str {
        &self.base
    }

    /// The node that contains the version of the stored formats.
    pub fn format(&self) -> String {
        format!("{}/=format", self.base)
    }

    /// The queue node of a lock.
    pub fn queue(&self, name: &LockName) -> String {
        format!("{}/{}", self.base, encode(name))
    }

    /// The path of a request's node without its sequence number. A request with an owner may re-enter past waiters;
    /// its name says so, so that a client that has only listed the queue knows which nodes to read.
    pub fn entry_prefix(&self, name: &LockName, hash: &AttemptHash, owned: bool) -> String {
        let owned = if owned { "own-" } else { "" };
        format!("{}/_c_{}-{owned}lock-", self.queue(name), hex(hash))
    }

    /// The hold-back node of an attempt.
    pub fn hold_back(&self, name: &LockName, hash: &AttemptHash) -> String {
        format!("{}/{HOLD_BACK}{}", self.queue(name), hex(hash))
    }

    /// The parent of the fence base.
    pub fn bases(&self) -> String {
        format!("{}/=fence-base", self.base)
    }

    pub fn base(&self, base: u64) -> String {
        format!("{}/=fence-base/{base}", self.base)
    }

    /// The parent of the request barriers.
    pub fn barriers(&self) -> String {
        format!("{}/=barriers", self.base)
    }

    /// The path of a session's request barrier without its sequence number.
    pub fn barrier(&self, session: i64) -> String {
        format!("{}/=barriers/{session:x}-", self.base)
    }

    /// The parent of the event nodes.
    pub fn events(&self) -> String {
        format!("{}/=events", self.base)
    }

    pub fn records(&self) -> String {
        format!("{}/=records", self.base)
    }

    pub fn record(&self, key: &LockName) -> String {
        format!("{}/=records/{}", self.base, encode(key))
    }

    /// The parent of the chunks of long records, one node for each record.
    pub fn chunks(&self) -> String {
        format!("{}/=chunks", self.base)
    }

    /// The parent of the chunks of one record.
    pub fn chunks_of(&self, key: &LockName) -> String {
        format!("{}/=chunks/{}", self.base, encode(key))
    }

    /// The node that a process writes when it begins a sweep.
    pub fn sweep(&self) -> String {
        format!("{}/=sweep", self.base)
    }
}

/// The kind of a child of a queue node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// The entry of a holder or a waiter.
    Entry {
        /// `None`: the entry of a foreign client.
        hash: Option<AttemptHash>,
        /// A request with an owner.
        owned: bool,
        sequence: u64,
    },
    /// A hold-back node.
    HoldBack(AttemptHash),
    /// Unknown.
    Other,
}

pub fn node_kind(text: &str) -> NodeKind {
    let parse_hash = |hex: &str| Attempt::from_hex(hex).ok().map(|hash| *hash.as_bytes());
    if let Some(hex) = text.strip_prefix(HOLD_BACK) {
        return parse_hash(hex).map_or(NodeKind::Other, NodeKind::HoldBack);
    }
    let digits = text.len() - text.bytes().rev().take_while(u8::is_ascii_digit).count();
    let Some(number) = text.get(digits..).filter(|n| n.len() >= 10).and_then(|n| n.parse::<u64>().ok())
    else {
        return NodeKind::Other;
    };
    // The sequence is a signed 32-bit number: after 2147483647 comes -2147483648.
    let negative = text[..digits].ends_with("--");
    let sequence = if negative { (1_u64 << 32).saturating_sub(number) } else { number };
    let ours = text[..digits].strip_prefix("_c_").and_then(|rest| rest.split_once('-'));
    let (hash, owned) = match ours {
        Some((hex, "lock-" | "lock--")) => (parse_hash(hex), false),
        Some((hex, "own-lock-" | "own-lock--")) => (parse_hash(hex), true),
        _ => (None, false),
    };
    NodeKind::Entry { hash, owned: owned && hash.is_some(), sequence }
}

/// The node name for a lock name: safe characters as they are, the others as `%XX`.
pub fn encode(name: &LockName) -> String {
    let text = name.as_str();
    if let "." | ".." = text {
        return text.replace('.', "%2E");
    }
    let mut node = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b':' | b',' | b'@' | b'+' => {
                node.push(char::from(byte));
            }
            _ => node.push_str(&format!("%{byte:02X}")),
        }
    }
    node
}

/// The lock name for a node name, if there is one.
pub fn decode(node: &str) -> Option<LockName> {
    let mut bytes = Vec::with_capacity(node.len());
    let mut rest = node.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || rest.next().and_then(|d| char::from(d).to_digit(16)).map(|d| d as u8);
                digit()? << 4 | digit()?
            }
            other => other,
        });
    }
    let name = LockName::new(String::from_utf8(bytes).ok()?).ok()?;
    // Only the canonical form, so that two nodes are never one name.
    (encode(&name) == node).then_some(name)
}

#[cfg(test)]
mod tests {
    use lockkeeper_store_kit::hash_attempt;

    use super::*;

    #[test]
    fn a_decoded_node_name_is_the_lock_name() {
        let names = [
            "a",
            "a/b",
            "/",
            "//",
            ".",
            "..",
            "...",
            "zookeeper",
            "=fence-base",
            "%2F",
            "%",
            "é",
            "\u{e000}",
            "🔒",
            "a b",
        ];
        let nodes: std::collections::BTreeSet<String> = names
            .iter()
            .map(|text| {
                let name = LockName::new(text).unwrap();
                let node = encode(&name);
                assert!(
                    node.is_ascii()
                        && !node.contains('/')
                        && !node.starts_with('=')
                        && node != "."
                        && node != ".."
                );
                assert_eq!(decode(&node), Some(name));
                node
            })
            .collect();
        assert_eq!(nodes.len(), names.len());
        for unexpected_reply in ["=fence-base", "%2f", "%41", "a%", "%FF", ""] {
            assert_eq!(decode(unexpected_reply), None, "{unexpected_reply:?} is not an encoded name");
        }
    }

    #[test]
    fn entries_of_all_clients_are_recognised() {
        let (keys, hash) = (Keys::new("/l"), hash_attempt(&Attempt::from_bytes([0xab; 16])));
        let name = LockName::new("x").unwrap();
        let last = |path: String| path.rsplit_once('/').unwrap().1.to_owned();
        let ours = last(keys.entry_prefix(&name, &hash, true)) + "0000000012";
        assert_eq!(node_kind(&ours), NodeKind::Entry { hash: Some(hash), owned: true, sequence: 12 });
        assert!(!ours.contains("abab"), "the node name contains the attempt");
        assert_eq!(node_kind(&last(keys.hold_back(&name, &hash))), NodeKind::HoldBack(hash));
        let foreign = |text| node_kind(text) == NodeKind::Entry { hash: None, owned: false, sequence: 7 };
        assert!(foreign("_c_0f4c2f3e-3a4b-4b57-9f4e-1d2c3b4a5f60-lock-0000000007"));
        assert!(foreign("8c2a04f4fb7a4ac59c2b3b8b8a9a3f10__lock__0000000007"));
        assert_eq!(node_kind("x"), NodeKind::Other);
        let wrapped = last(keys.entry_prefix(&name, &hash, false)) + "-2147483648";
        assert_eq!(
            node_kind(&wrapped),
            NodeKind::Entry { hash: Some(hash), owned: false, sequence: 1 << 31 }
        );
    }
}
