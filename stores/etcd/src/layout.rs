//! Which key is what. A lock's keys are those of `etcdctl lock`: the name, a slash, and one key for each who holds it or
//! waits. Names may have slashes in them, so only what has none in its last part belongs to the name before it.
//!
//! What is not a lock has an empty name: no lock can have that.

use lockkeeper_core::{Attempt, LockName, Owner};
use ring::digest::{SHA256, digest};

/// What an attempt is called in keys that everybody may see. The attempt cannot be found from it.
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

#[derive(Clone, Debug)]
pub struct Layout {
    prefix: String,
}

impl Layout {
    pub fn new(prefix: &str) -> Self {
        Layout { prefix: prefix.to_owned() }
    }

    /// What all names that begin with `start` have in common.
    pub fn all(&self, start: &str) -> Vec<u8> {
        format!("{}{start}", self.prefix).into_bytes()
    }

    /// What all keys of a lock begin with.
    pub fn queue(&self, name: &LockName) -> Vec<u8> {
        format!("{}{name}/", self.prefix).into_bytes()
    }

    /// The key of one ask.
    pub fn key(&self, name: &LockName, mark: &Mark) -> Vec<u8> {
        let mut key = self.queue(name);
        key.extend(Attempt::from_bytes(*mark).to_hex().into_bytes());
        key
    }

    /// The name that a key belongs to, if it is the key of a lock, and what it is called there.
    pub fn name<'a>(&self, key: &'a [u8]) -> Option<(LockName, &'a str)> {
        let text = std::str::from_utf8(key.strip_prefix(self.prefix.as_bytes())?).ok()?;
        let (name, rest) = text.rsplit_once('/')?;
        Some((LockName::new(name).ok()?, rest))
    }

    /// What is added to a revision to make it a fence.
    pub fn base(&self) -> Vec<u8> {
        self.all("/base")
    }

    /// Why something was taken away, for those who watch.
    pub fn why(&self) -> Vec<u8> {
        self.all("/why")
    }

    pub fn records(&self) -> Vec<u8> {
        self.all("/record:")
    }

    pub fn record(&self, key: &LockName) -> Vec<u8> {
        let hidden = key.as_str().replace('%', "%25").replace('/', "%2F");
        self.all(&format!("/record:{hidden}"))
    }

    pub fn record_name(&self, key: &[u8]) -> Option<LockName> {
        let text = std::str::from_utf8(key.strip_prefix(self.records().as_slice())?).ok()?;
        LockName::new(text.replace("%2F", "/").replace("%25", "%")).ok()
    }
}

/// The mark that stands at the end of a key, if it is one of ours.
pub fn mark_in(rest: &str) -> Option<Mark> {
    (rest.len() == 32).then(|| Attempt::from_hex(rest).ok()).flatten().map(|mark| *mark.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_from_their_keys() {
        let layout = Layout::new("lock/");
        let mark = mark(&Attempt::from_bytes([7; 16]));
        for text in ["a", "a/b", "/", "//", "a/", "/a", "record:x", "%2F", "%252F", "base", "é", "lock/"] {
            let name = LockName::new(text).unwrap();
            let key = layout.key(&name, &mark);
            let (back, rest) = layout.name(&key).unwrap();
            assert_eq!((back.as_str(), mark_in(rest)), (text, Some(mark)));
            assert_eq!(layout.record_name(&layout.record(&name)), Some(name.clone()));
            assert_eq!(layout.name(&layout.record(&name)), None, "a record is no lock");
        }
        assert_eq!(layout.name(&layout.base()), None);
    }

    #[test]
    fn the_attempt_is_not_in_its_key() {
        let attempt = Attempt::from_bytes([0xab; 16]);
        assert!(!Attempt::from_bytes(mark(&attempt)).to_hex().contains("abab"));
    }
}
