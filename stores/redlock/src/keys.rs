//! The names of the keys and channels of a lock.

use lockkeeper_core::LockName;

use crate::config::Options;

/// The one counter of fences of a node. It has no expiry.
pub const FENCE_COUNTER: &str = "lockkeeper:{all}:fence";

/// Names of keys, for one prefix and one database.
pub struct Keys {
    prefix: String,
    db: u32,
}

impl Keys {
    pub fn new(options: &Options) -> Self {
        Keys { prefix: options.prefix.clone(), db: options.access.db }
    }

    /// The key of a lock: the prefix and the name, nothing else, because other Redlock clients use the same.
    pub fn lock_key(&self, name: &LockName) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The key of a lock, and the key of the metadata beside it.
    pub fn lock_and_vote(&self, name: &LockName) -> [String; 2] {
        let key = self.lock_key(name);
        let vote = format!("lockkeeper:{{all}}:vote:{key}");
        [key, vote]
    }

    /// The same, and the counter of fences.
    pub fn lock_vote_and_counter(&self, name: &LockName) -> [String; 3] {
        let [lock, vote] = self.lock_and_vote(name);
        [lock, vote, FENCE_COUNTER.to_owned()]
    }

    /// The name of the lock with this key.
    pub fn lock_name(&self, key: &[u8]) -> Option<LockName> {
        let name = std::str::from_utf8(key.strip_prefix(self.prefix.as_bytes())?).ok()?;
        LockName::new(name).ok()
    }

    /// The pattern of the keys of locks whose names begin with `prefix`.
    pub fn pattern(&self, prefix: &str) -> String {
        format!("{}*", glob_escape(&format!("{}{prefix}", self.prefix)))
    }

    /// The channel on which the release of a lock is published.
    pub fn channel(&self, key: &str) -> String {
        format!("lockkeeper:free:{}:{key}", self.db)
    }
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
