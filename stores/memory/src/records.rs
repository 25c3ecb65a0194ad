//! Records in memory, and the `Records` trait.

use std::ops::Bound;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, WriteOutcome,
};

use crate::MemoryStore;

#[async_trait]
impl Records for MemoryStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        Ok(self.with_state(|state, now| state.records.sweep(now.moment).get(key).cloned()))
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        Record::check(value, ttl)?;
        self.with_state(|state, now| {
            let found = state.records.sweep(now.moment).get(key);
            if !expect.met_by(found.map(|record| record.version)) {
                return Ok(WriteOutcome::Conflict(found.cloned()));
            }
            // The counter of the fences: a record that is deleted and created again never repeats a version.
            let version = Version(state.table.next_fence(now.wall)?.get());
            let record = Record { key: key.clone(), value: value.to_vec(), version };
            state.records.put(record, ttl.map(|ttl| now.moment + ttl));
            Ok(WriteOutcome::Written(version))
        })
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        Ok(self.with_state(|state, now| match state.records.sweep(now.moment).get(key) {
            Some(found) if !expect.met_by(Some(found.version)) => DeleteOutcome::Conflict(found.clone()),
            Some(_) => {
                state.records.remove(key);
                DeleteOutcome::Deleted
            }
            None => DeleteOutcome::Absent,
        }))
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        Ok(self.with_state(|state, now| {
            let from = match &page.after {
                Some(after) if after.as_str() >= prefix => Bound::Excluded(after.as_str()),
                _ => Bound::Included(prefix),
            };
            let records = &state.records.sweep(now.moment).records;
            let mut found = records
                .range::<str, _>((from, Bound::Unbounded))
                .take_while(|(key, _)| key.as_str().starts_with(prefix))
                .map(|(_, (record, _))| record.clone());
            let records: Vec<Record> = found.by_ref().take(page.size()).collect();
            let next = found.next().and(records.last()).map(|last| last.key.clone());
            RecordPage { records, next }
        }))
    }
}
