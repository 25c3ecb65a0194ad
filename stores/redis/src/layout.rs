//! Which keys there are. In a cluster everything that belongs to one lock is in the hash slot of the lock's own key.

use std::sync::OnceLock;

use lockkeeper_core::LockName;

/// Keys that one script may touch together: those of one hash slot, or, on a single server, all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group(u16);

/// The keys of a store.
#[derive(Clone, Debug)]
pub struct Layout {
    prefix: String,
    cluster: bool,
}

impl Layout {
    pub fn new(prefix: &str, cluster: bool) -> Self {
        Layout { prefix: prefix.into(), cluster }
    }

    /// The key of a lock (or the end of the key of a record): the prefix and the name, nothing else, because that is
    /// what other clients use.
    pub fn key(&self, name: &LockName) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The name in a key.
    pub fn name(&self, key: &[u8]) -> Option<LockName> {
        let name = std::str::from_utf8(key.strip_prefix(self.prefix.as_bytes())?).ok()?;
        LockName::new(name).ok()
    }

    pub fn group(&self, name: &LockName) -> Group {
        if self.cluster { Group(slot(self.key(name).as_bytes())) } else { Group(0) }
    }

    /// Every group there is.
    pub fn groups(&self) -> impl Iterator<Item = Group> {
        (0..if self.cluster { SLOTS } else { 1 }).map(Group)
    }

    /// What all our other keys of a group begin with.
    pub fn base(&self, group: Group) -> String {
        if self.cluster { format!("lockkeeper:{{{}}}:", tag(group.0)) } else { "lockkeeper:{all}:".into() }
    }

    /// The pattern that finds what `kind` of key there is for names that begin with `start`, in all groups.
    pub fn pattern(&self, kind: &str, start: &str) -> String {
        let kind = if kind.is_empty() { String::new() } else { format!("lockkeeper:{{*}}:{kind}:") };
        format!("{kind}{}*", glob_escape(&format!("{}{start}", self.prefix)))
    }

    /// The lock's key in the key of something that belongs to it.
    pub fn owner_key<'k>(&self, kind: &str, key: &'k [u8]) -> Option<&'k [u8]> {
        let rest = key.strip_prefix(b"lockkeeper:{")?;
        let end = rest.iter().position(|b| *b == b'}')?;
        rest[end..].strip_prefix(b"}:")?.strip_prefix(kind.as_bytes())?.strip_prefix(b":")
    }
}

impl Group {
    pub fn slot(self) -> u16 {
        self.0
    }
}

pub const SLOTS: u16 = 16384;

/// The hash slot of a key: of what is in its first braces, if they are there and not empty.
pub fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|b| *b == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        rest.iter().position(|b| *b == b'}').filter(|len| *len > 0).map(|len| &rest[..len])
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

/// CRC-16/XMODEM, as the specification of the cluster wants it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ u16::from(*byte) << 8,
            |crc, _| if crc & 0x8000 != 0 { crc << 1 ^ 0x1021 } else { crc << 1 },
        )
    })
}

/// The smallest number whose decimal digits hash to a slot. A lock's own key cannot serve as the tag: it may have braces
/// of its own in it, in any order.
fn tag(slot_wanted: u16) -> u32 {
    static TAGS: OnceLock<Vec<u32>> = OnceLock::new();
    let tags = TAGS.get_or_init(|| {
        let mut tags = vec![u32::MAX; usize::from(SLOTS)];
        let mut missing = tags.len();
        for number in 0u32.. {
            let found = &mut tags[usize::from(slot(number.to_string().as_bytes()))];
            if *found == u32::MAX {
                *found = number;
                missing -= 1;
                if missing == 0 {
                    break;
                }
            }
        }
        tags
    });
    tags[usize::from(slot_wanted)]
}

fn glob_escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        if matches!(c, '*' | '?' | '[' | ']' | '^' | '-' | '\\') {
            out.push('\\');
        }
        out.push(c);
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(slot(b"foo"), 12182);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
    }

    #[test]
    fn all_keys_of_a_lock_share_its_slot() {
        let layout = Layout::new("lock:", true);
        for text in ["orders/42", "{x}", "{x}y", "x}", "}{", "{}", "{{a}}", "a}b{c}d"] {
            let name = LockName::new(text).unwrap();
            let key = layout.key(&name);
            let base = layout.base(layout.group(&name));
            assert_eq!(slot(format!("{base}line:{key}").as_bytes()), slot(key.as_bytes()), "{text}");
            let line = format!("{base}line:{key}");
            assert_eq!(layout.owner_key("line", line.as_bytes()), Some(key.as_bytes()));
            assert_eq!(layout.name(key.as_bytes()), Some(name));
        }
    }
}
