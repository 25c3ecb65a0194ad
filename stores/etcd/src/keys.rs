//! Which key is what. A lock has the keys of `etcdctl lock`: the prefix, the name, a slash, and one key for each holder
//! and each waiter. A name may contain slashes, so a key belongs to the name before its *last* slash.
//!
//! Keys that belong to no lock have an empty name, which no lock can have.

use lockkeeper_core::{Attempt, LockName, Names};
use lockkeeper_store_kit::AttemptHash;

/// The last part of an entry's key: the hash of the attempt, or the number of a key slot.
pub type KeyId = AttemptHash;

/// Builds and parses the keys below one prefix.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    pub fn new(prefix: &str) -> Self {
        Keys { prefix: prefix.to_owned() }
    }

    /// The common prefix of the keys of all names that begin with `start`.
    pub fn starting_with(&self, start: &str) -> Vec<u8> {
        format!("{}{start}", self.prefix).into_bytes()
    }

    /// The common prefix of all keys of one lock.
    pub fn lock_prefix(&self, name: &LockName) -> Vec<u8> {
        format!("{}{name}/", self.prefix).into_bytes()
    }

    /// The key of one holder or waiter.
    pub fn entry_key(&self, name: &LockName, id: &KeyId) -> Vec<u8> {
        let mut key = self.lock_prefix(name);
        key.extend(Attempt::from_bytes(*id).to_hex().into_bytes());
        key
    }

    /// The keys of one request, under each of its names.
    pub fn entry_keys(&self, names: &Names, id: &KeyId) -> Vec<Vec<u8>> {
        names.iter().map(|name| self.entry_key(name, id)).collect()
    }

    /// The lock that a key belongs to, and the last part of the key. `None`: it is not the key of a lock.
    pub fn parse_entry_key<'a>(&self, key: &'a [u8]) -> Option<(LockName, &'a str)> {
        let text = std::str::from_utf8(key.strip_prefix(self.prefix.as_bytes())?).ok()?;
        let (name, last) = text.rsplit_once('/')?;
        Some((LockName::new(name).ok()?, last))
    }

    /// Holds the format version and the number that is added to a revision to make it a fence.
    pub fn fence_base(&self) -> Vec<u8> {
        self.starting_with("/fence-base")
    }

    /// Holds the cause of the last expiry, break or revocation, for watchers.
    pub fn change_cause(&self) -> Vec<u8> {
        self.starting_with("/change-cause")
    }

    pub fn records(&self) -> Vec<u8> {
        self.starting_with("/record:")
    }

    pub fn record(&self, key: &LockName) -> Vec<u8> {
        let escaped = key.as_str().replace('%', "%25").replace('/', "%2F");
        self.starting_with(&format!("/record:{escaped}"))
    }

    pub fn parse_record_key(&self, key: &[u8]) -> Option<LockName> {
        let text = std::str::from_utf8(key.strip_prefix(self.records().as_slice())?).ok()?;
        LockName::new(text.replace("%2F", "/").replace("%25", "%")).ok()
    }
}

/// The id at the end of a key. `None`: Lockkeeper did not write the key.
pub fn parse_key_id(last: &str) -> Option<KeyId> {
    (last.len() == 32).then(|| Attempt::from_hex(last).ok()).flatten().map(|id| *id.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_gives_its_name_back() {
        let keys = Keys::new("lock/");
        let id = [7; 16];
        for text in
            ["a", "a/b", "/", "//", "a/", "/a", "record:x", "%2F", "%252F", "fence-base", "é", "lock/"]
        {
            let name = LockName::new(text).unwrap();
            let key = keys.entry_key(&name, &id);
            let (back, last) = keys.parse_entry_key(&key).unwrap();
            assert_eq!((back.as_str(), parse_key_id(last)), (text, Some(id)));
            assert_eq!(keys.parse_record_key(&keys.record(&name)), Some(name.clone()));
            assert_eq!(keys.parse_entry_key(&keys.record(&name)), None, "a record is no lock");
        }
        assert_eq!(keys.parse_entry_key(&keys.fence_base()), None);
    }
}
