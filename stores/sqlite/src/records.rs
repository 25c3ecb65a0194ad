//! Records: small values with versions. Versions and fences come from the same counter.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, WriteOutcome,
};
use rusqlite::params;

use crate::codec::{self, duration_nanos, instant_nanos, signed};
use crate::error::sql_error;
use crate::statements;
use crate::store::SqliteStore;
use crate::transaction::Tx;

impl Tx<'_> {
    pub fn record(&self, key: &LockName) -> Result<Option<Record>> {
        self.one(statements::RECORD, params![key.as_str(), instant_nanos(self.now.moment)], codec::record)
    }

    pub fn put(
        &mut self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let found = self.record(key)?;
        if !expect.met_by(found.as_ref().map(|record| record.version)) {
            return Ok(WriteOutcome::Conflict(found));
        }
        // One counter for all versions: a record that is deleted and created again never repeats a version.
        let version = self.next_fence()?.get();
        let expires = ttl.map(|ttl| instant_nanos(self.now.moment + ttl));
        let row = params![key.as_str(), value, signed(version), ttl.map(duration_nanos), expires];
        self.change(statements::PUT_RECORD, row)?;
        Ok(WriteOutcome::Written(Version(version)))
    }

    pub fn delete(&mut self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        match self.record(key)? {
            Some(found) if !expect.met_by(Some(found.version)) => Ok(DeleteOutcome::Conflict(found)),
            Some(_) => {
                self.change(statements::REMOVE_RECORD, [key.as_str()])?;
                Ok(DeleteOutcome::Deleted)
            }
            None => Ok(DeleteOutcome::Absent),
        }
    }

    pub fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let (text, from) = match &page.after {
            Some(after) if after.as_str() >= prefix => (statements::RECORDS_AFTER, after.as_str()),
            _ => (statements::RECORDS_FROM, prefix),
        };
        let mut records = Vec::new();
        let mut statement = self.sql.prepare_cached(text).map_err(sql_error)?;
        let mut rows = statement.query(params![from, instant_nanos(self.now.moment)]).map_err(sql_error)?;
        while let Some(row) = rows.next().map_err(sql_error)? {
            let record = codec::record(row).map_err(sql_error)?;
            if !record.key.as_str().starts_with(prefix) {
                break;
            }
            if records.len() == page.size() {
                let next = records.last().map(|last: &Record| last.key.clone());
                return Ok(RecordPage { records, next });
            }
            records.push(record);
        }
        Ok(RecordPage { records, next: None })
    }
}

#[async_trait]
impl Records for SqliteStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let key = key.clone();
        self.call(move |worker| Ok(worker.read(|tx| tx.record(&key))?.0)).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        Record::check(value, ttl)?;
        let (key, value) = (key.clone(), value.to_vec());
        self.change(move |tx| tx.put(&key, &value, expect, ttl)).await
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        let key = key.clone();
        self.change(move |tx| tx.delete(&key, expect)).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let (prefix, page) = (prefix.to_owned(), page.clone());
        self.call(move |worker| Ok(worker.read(|tx| tx.scan(&prefix, &page))?.0)).await
    }
}
