//! The records.

use std::collections::{BTreeMap, BTreeSet};

use lockkeeper_core::{BootInstant, LockName, Record};

/// Records in the order of their keys, and those with a ttl in the order of their ends.
#[derive(Debug, Default)]
pub(crate) struct RecordIndex {
    pub records: BTreeMap<LockName, (Record, Option<BootInstant>)>,
    ends: BTreeSet<(BootInstant, LockName)>,
}

impl RecordIndex {
    pub fn sweep(&mut self, now: BootInstant) -> &mut Self {
        while let Some((_, key)) = self.ends.first().filter(|(end, _)| *end <= now).cloned() {
            self.remove(&key);
        }
        self
    }

    pub fn get(&self, key: &LockName) -> Option<&Record> {
        self.records.get(key).map(|(record, _)| record)
    }

    pub fn put(&mut self, record: Record, end: Option<BootInstant>) {
        self.remove(&record.key);
        if let Some(end) = end {
            self.ends.insert((end, record.key.clone()));
        }
        self.records.insert(record.key.clone(), (record, end));
    }

    pub fn remove(&mut self, key: &LockName) {
        if let Some((_, Some(end))) = self.records.remove(key) {
            self.ends.remove(&(end, key.clone()));
        }
    }
}
