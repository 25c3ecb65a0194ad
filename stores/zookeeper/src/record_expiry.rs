//! The expiry of records with a ttl. Readers ignore an expired record; the process that wrote it, or the next one that
//! reads it, deletes it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard};

use lockkeeper_core::{BootInstant, IgnorePoison, LockName};
use tokio::sync::Notify;

/// The records to delete, and when: one entry for each record, however often it is written.
#[derive(Default)]
pub struct RecordExpiry {
    table: Mutex<ExpiryTable>,
    changed: Notify,
}

#[derive(Default)]
struct ExpiryTable {
    /// When the record expires, and the data version of its node.
    by_key: HashMap<LockName, (BootInstant, i32)>,
    by_time: BTreeSet<(BootInstant, LockName)>,
}

impl ExpiryTable {
    fn remove(&mut self, key: &LockName) {
        if let Some((at, _)) = self.by_key.remove(key) {
            self.by_time.remove(&(at, key.clone()));
        }
    }
}

impl RecordExpiry {
    fn table(&self) -> MutexGuard<'_, ExpiryTable> {
        self.table.lock().ignore_poison()
    }

    /// Schedules the deletion of this version of a record.
    pub fn schedule(&self, key: &LockName, at: BootInstant, node_version: i32) {
        let mut table = self.table();
        table.remove(key);
        table.by_key.insert(key.clone(), (at, node_version));
        table.by_time.insert((at, key.clone()));
        if table.by_time.first().is_some_and(|(_, first)| first == key) {
            self.changed.notify_one();
        }
    }

    /// Forgets a record that was deleted, or that has no ttl any more.
    pub fn cancel(&self, key: &LockName) {
        self.table().remove(key);
    }

    /// Waits until a record may expire sooner than [`due`](Self::due) said.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Removes and returns the first expired record. `Err`: when the next one expires.
    pub fn due(&self, now: BootInstant) -> Result<(LockName, i32), Option<BootInstant>> {
        let mut table = self.table();
        let Some((at, key)) = table.by_time.first().cloned() else { return Err(None) };
        if at > now {
            return Err(Some(at));
        }
        let node_version = table.by_key.get(&key).map_or(0, |(_, node_version)| *node_version);
        table.remove(&key);
        Ok((key, node_version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_written_often_has_one_entry() {
        let (record_expiry, key) = (RecordExpiry::default(), LockName::new("k").unwrap());
        let at = |n| BootInstant::from_nanos(n);
        for n in 0..1000 {
            record_expiry.schedule(&key, at(1000 - n), i32::try_from(n).unwrap());
        }
        assert_eq!(record_expiry.table().by_key.len(), 1);
        assert_eq!(record_expiry.table().by_time.len(), 1);
        assert_eq!(record_expiry.due(at(0)), Err(Some(at(1))));
        assert_eq!(record_expiry.due(at(1)), Ok((key.clone(), 999)));
        record_expiry.schedule(&key, at(5), 7);
        record_expiry.cancel(&key);
        assert_eq!(record_expiry.due(at(9)), Err(None));
        assert!(record_expiry.table().by_key.is_empty());
    }
}
