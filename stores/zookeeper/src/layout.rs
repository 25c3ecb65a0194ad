//! Which node is what. A lock's nodes are those of Curator: below the name, `_c_GUID-lock-SEQUENCE` for each who holds it
//! or waits. Names are percent-encoded, so that every name is one node.
//!
//! What is not a lock begins with `=`: no encoded name does.

use lockkeeper_core::{Attempt, LockName, Owner};
use ring::digest::{SHA256, digest};

/// What an attempt is called in nodes that everybody may see. The attempt cannot be found from it.
pub type Mark = [u8; 16];

pub fn mark(attempt: &Attempt) -> Mark {
    hash(b"attempt", attempt.as_bytes())
}

/// An owner is what lets others re-enter: it is not shown either.
pub fn owner_mark(owner: &Owner) -> Owner {
    Owner::from_bytes(hash(b"owner", owner.as_bytes()))
}

fn hash(what: &[u8], secret: &[u8; 16]) -> Mark {
    let long = digest(&SHA256, &[what, &secret[..]].concat());
    std::array::from_fn(|i| long.as_ref()[i])
}

fn hex(mark: &Mark) -> String {
    Attempt::from_bytes(*mark).to_hex()
}

const BACK: &str = "=back-";

#[derive(Clone, Debug)]
pub struct Layout {
    base: String,
}

impl Layout {
    pub fn new(base: &str) -> Self {
        Layout { base: base.to_owned() }
    }

    /// The node that everything is below.
    pub fn root(&self) -> &str {
        &self.base
    }

    /// The node that the line of a lock is below.
    pub fn line(&self, name: &LockName) -> String {
        format!("{}/{}", self.base, encode(name))
    }

    /// What the node of an ask is called, before its sequence. Those that may re-enter past the line are marked, so
    /// that whoever only lists the line knows whom to look at.
    pub fn place(&self, name: &LockName, mark: &Mark, owned: bool) -> String {
        let owned = if owned { "own-" } else { "" };
        format!("{}/_c_{}-{owned}lock-", self.line(name), hex(mark))
    }

    /// What holds a lock back when the session of its holder is gone.
    pub fn back(&self, name: &LockName, mark: &Mark) -> String {
        format!("{}/{BACK}{}", self.line(name), hex(mark))
    }

    /// What is added to a zxid to make it a fence is the name of a node below this one.
    pub fn bases(&self) -> String {
        format!("{}/=base", self.base)
    }

    pub fn base(&self, base: u64) -> String {
        format!("{}/=base/{base}", self.base)
    }

    /// Where sessions have their gates.
    pub fn gates(&self) -> String {
        format!("{}/=gates", self.base)
    }

    /// What the gate of a session is called, before its sequence.
    pub fn gate(&self, session: i64) -> String {
        format!("{}/=gates/{session:x}-", self.base)
    }

    /// What happened, for those who watch.
    pub fn events(&self) -> String {
        format!("{}/=events", self.base)
    }

    pub fn records(&self) -> String {
        format!("{}/=records", self.base)
    }

    pub fn record(&self, key: &LockName) -> String {
        format!("{}/=records/{}", self.base, encode(key))
    }

    /// What is too long for one node.
    pub fn parts(&self) -> String {
        format!("{}/=parts", self.base)
    }
}

/// What a node in the line of a lock is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Child {
    /// Somebody holds it or waits.
    Place {
        /// `None`: it is somebody else's client.
        mark: Option<Mark>,
        /// An ask with an owner.
        owned: bool,
        order: u64,
    },
    /// It may be held back.
    Back(Mark),
    /// Nothing that we know.
    Other,
}

pub fn child(text: &str) -> Child {
    let mark_in = |hex: &str| Attempt::from_hex(hex).ok().map(|mark| *mark.as_bytes());
    if let Some(hex) = text.strip_prefix(BACK) {
        return mark_in(hex).map_or(Child::Other, Child::Back);
    }
    let digits = text.len() - text.bytes().rev().take_while(u8::is_ascii_digit).count();
    let Some(number) = text.get(digits..).filter(|n| n.len() >= 10).and_then(|n| n.parse::<u64>().ok())
    else {
        return Child::Other;
    };
    // The sequence has 32 bits with a sign: after two thousand million comes the most negative one.
    let negative = text[..digits].ends_with("--");
    let order = if negative { (1_u64 << 32).saturating_sub(number) } else { number };
    let ours = text[..digits].strip_prefix("_c_").and_then(|rest| rest.split_once('-'));
    let (mark, owned) = match ours {
        Some((hex, "lock-" | "lock--")) => (mark_in(hex), false),
        Some((hex, "own-lock-" | "own-lock--")) => (mark_in(hex), true),
        _ => (None, false),
    };
    Child::Place { mark, owned: owned && mark.is_some(), order }
}

/// A name as the name of a node: plain where it is plain, the rest as `%XX`.
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

/// The name behind a node, if it is the node of a name.
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
    // Only what we would write ourselves, so that two nodes are never one name.
    (encode(&name) == node).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_from_their_nodes() {
        let odd = [
            "a",
            "a/b",
            "/",
            "//",
            ".",
            "..",
            "...",
            "zookeeper",
            "=base",
            "%2F",
            "%",
            "é",
            "\u{e000}",
            "🔒",
            "a b",
        ];
        let nodes: std::collections::BTreeSet<String> = odd
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
        assert_eq!(nodes.len(), odd.len());
        for strange in ["=base", "%2f", "%41", "a%", "%FF", ""] {
            assert_eq!(decode(strange), None, "{strange:?} is no name of ours");
        }
    }

    #[test]
    fn places_of_all_clients_are_known() {
        let (layout, mark) = (Layout::new("/l"), mark(&Attempt::from_bytes([0xab; 16])));
        let name = LockName::new("x").unwrap();
        let last = |path: String| path.rsplit_once('/').unwrap().1.to_owned();
        let ours = last(layout.place(&name, &mark, true)) + "0000000012";
        assert_eq!(child(&ours), Child::Place { mark: Some(mark), owned: true, order: 12 });
        assert!(!ours.contains("abab"), "the attempt is in its node");
        assert_eq!(child(&last(layout.back(&name, &mark))), Child::Back(mark));
        let foreign = |text| child(text) == Child::Place { mark: None, owned: false, order: 7 };
        assert!(foreign("_c_0f4c2f3e-3a4b-4b57-9f4e-1d2c3b4a5f60-lock-0000000007"));
        assert!(foreign("8c2a04f4fb7a4ac59c2b3b8b8a9a3f10__lock__0000000007"));
        assert_eq!(child("x"), Child::Other);
        let wrapped = last(layout.place(&name, &mark, false)) + "-2147483648";
        assert_eq!(child(&wrapped), Child::Place { mark: Some(mark), owned: false, order: 1 << 31 });
    }
}
