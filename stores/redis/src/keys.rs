//! The names of the keys: lock name to key and back. In a cluster all keys of a lock are in the hash slot of the lock key.

use std::sync::OnceLock;

use lockkeeper_core::LockName;

/// Keys that one script may use together: those of one hash slot, or, on a single server, all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyGroup(u16);

/// The names of the keys of a store.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
    cluster: bool,
}

impl Keys {
    pub fn new(prefix: &str, cluster: bool) -> Self {
        Keys { prefix: prefix.into(), cluster }
    }

    /// The key of a lock (and the end of a record's key): the prefix and the name and no more, because other lock clients use
    /// that key too.
    pub fn lock_key(&self, name: &LockName) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The lock name in a lock key.
    pub fn lock_name(&self, key: &[u8]) -> Option<LockName> {
        let name = std::str::from_utf8(key.strip_prefix(self.prefix.as_bytes())?).ok()?;
        LockName::new(name).ok()
    }

    pub fn group(&self, name: &LockName) -> KeyGroup {
        if self.cluster { KeyGroup(slot(self.lock_key(name).as_bytes())) } else { KeyGroup(0) }
    }

    /// All groups.
    pub fn groups(&self) -> impl Iterator<Item = KeyGroup> {
        (0..if self.cluster { SLOTS } else { 1 }).map(KeyGroup)
    }

    /// The prefix of all other keys of a group.
    pub fn group_prefix(&self, group: KeyGroup) -> String {
        if self.cluster {
            format!("lockkeeper:{{{}}}:", hash_tag(group.0))
        } else {
            "lockkeeper:{all}:".into()
        }
    }

    /// The `SCAN` pattern of keys of one kind for lock names that begin with `start`, in all groups. The kind of a lock key is empty.
    pub fn pattern(&self, kind: &str, start: &str) -> String {
        let kind = if kind.is_empty() { String::new() } else { format!("lockkeeper:{{*}}:{kind}:") };
        format!("{kind}{}*", glob_escape(&format!("{}{start}", self.prefix)))
    }

    /// The lock key that is part of another key of the lock.
    pub fn lock_key_in<'k>(&self, kind: &str, key: &'k [u8]) -> Option<&'k [u8]> {
        let rest = key.strip_prefix(b"lockkeeper:{")?;
        let end = rest.iter().position(|b| *b == b'}')?;
        rest[end..].strip_prefix(b"}:")?.strip_prefix(kind.as_bytes())?.strip_prefix(b":")
    }
}

impl KeyGroup {
    pub fn slot(self) -> u16 {
        self.0
    }
}

pub const SLOTS: u16 = 16384;

/// The hash slot of a key, or of its hash tag: what the first braces enclose, unless that is empty.
pub fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|b| *b == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        rest.iter().position(|b| *b == b'}').filter(|len| *len > 0).map(|len| &rest[..len])
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

/// CRC-16/XMODEM, as in the [cluster specification](https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ u16::from(*byte) << 8,
            |crc, _| if crc & 0x8000 != 0 { crc << 1 ^ 0x1021 } else { crc << 1 },
        )
    })
}

/// The smallest number whose decimal digits hash to a slot. The lock key itself cannot be the hash tag, because the name may
/// contain braces in any order.
fn hash_tag(slot_wanted: u16) -> u32 {
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
        let keys = Keys::new("lock:", true);
        for text in ["orders/42", "{x}", "{x}y", "x}", "}{", "{}", "{{a}}", "a}b{c}d"] {
            let name = LockName::new(text).unwrap();
            let key = keys.lock_key(&name);
            let base = keys.group_prefix(keys.group(&name));
            assert_eq!(slot(format!("{base}queue:{key}").as_bytes()), slot(key.as_bytes()), "{text}");
            let queue = format!("{base}queue:{key}");
            assert_eq!(keys.lock_key_in("queue", queue.as_bytes()), Some(key.as_bytes()));
            assert_eq!(keys.lock_name(key.as_bytes()), Some(name));
        }
    }
}
