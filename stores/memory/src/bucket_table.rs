//! The buckets of the rate limits.

use std::collections::{BTreeSet, HashMap};

use lockkeeper_core::LockName;

/// The buckets that are not full, also in the order in which they become full.
#[derive(Debug, Default)]
pub(crate) struct BucketTable {
    pub full_at: HashMap<LockName, u64>,
    ends: BTreeSet<(u64, LockName)>,
}

impl BucketTable {
    pub fn sweep(&mut self, now: u64) {
        while let Some((_, key)) = self.ends.first().filter(|(at, _)| *at <= now).cloned() {
            self.remove(&key);
        }
    }

    pub fn set(&mut self, key: &LockName, at: u64) {
        self.remove(key);
        self.full_at.insert(key.clone(), at);
        self.ends.insert((at, key.clone()));
    }

    pub fn remove(&mut self, key: &LockName) {
        if let Some(at) = self.full_at.remove(key) {
            self.ends.remove(&(at, key.clone()));
        }
    }
}
