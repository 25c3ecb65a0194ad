use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    Delete, Expect, LockName, Moment, Page, Record, RecordPage, Records, Result, Version, Write,
};

use crate::MemoryStore;

/// Records in order of their keys, and the ones that will go in order of their end.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    records: BTreeMap<LockName, (Record, Option<Moment>)>,
    ends: BTreeSet<(Moment, LockName)>,
}

impl Shelf {
    fn tidy(&mut self, now: Moment) -> &mut Self {
        while let Some((_, key)) = self.ends.first().filter(|(end, _)| *end <= now).cloned() {
            self.remove(&key);
        }
        self
    }

    fn get(&self, key: &LockName) -> Option<&Record> {
        self.records.get(key).map(|(record, _)| record)
    }

    fn put(&mut self, record: Record, end: Option<Moment>) {
        self.remove(&record.key);
        if let Some(end) = end {
            self.ends.insert((end, record.key.clone()));
        }
        self.records.insert(record.key.clone(), (record, end));
    }

    fn remove(&mut self, key: &LockName) {
        if let Some((_, Some(end))) = self.records.remove(key) {
            self.ends.remove(&(end, key.clone()));
        }
    }
}

#[async_trait]
impl Records for MemoryStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        Ok(self.at_desk(|desk, now| desk.shelf.tidy(now.moment).get(key).cloned()))
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        Record::check(value, ttl)?;
        self.at_desk(|desk, now| {
            let found = desk.shelf.tidy(now.moment).get(key);
            if !expect.met_by(found.map(|record| record.version)) {
                return Ok(Write::Conflict(found.cloned()));
            }
            // The fences' own counter: a record that is deleted and made again never repeats a version.
            let version = Version(desk.table.next_fence(now.wall)?.get());
            let record = Record { key: key.clone(), value: value.to_vec(), version };
            desk.shelf.put(record, ttl.map(|ttl| now.moment + ttl));
            Ok(Write::Written(version))
        })
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        Ok(self.at_desk(|desk, now| match desk.shelf.tidy(now.moment).get(key) {
            Some(found) if !expect.met_by(Some(found.version)) => Delete::Conflict(found.clone()),
            Some(_) => {
                desk.shelf.remove(key);
                Delete::Deleted
            }
            None => Delete::Absent,
        }))
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        Ok(self.at_desk(|desk, now| {
            let from = match &page.after {
                Some(after) if after.as_str() >= prefix => Bound::Excluded(after.as_str()),
                _ => Bound::Included(prefix),
            };
            let records = &desk.shelf.tidy(now.moment).records;
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
