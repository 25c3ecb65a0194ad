//! Records: small versioned values, whose versions come from the fences' own counter.

use std::time::Duration;

use lockkeeper_core::{Delete, Expect, LockName, Page, Record, RecordPage, Result, Version, Write};
use rusqlite::params;

use crate::fault::fault;
use crate::rows::{self, moment, signed, span};
use crate::script;
use crate::tx::Tx;

impl Tx<'_> {
    pub fn record(&self, key: &LockName) -> Result<Option<Record>> {
        self.one(script::RECORD, params![key.as_str(), moment(self.now.moment)], rows::record)
    }

    pub fn put(
        &mut self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        let found = self.record(key)?;
        if !expect.met_by(found.as_ref().map(|record| record.version)) {
            return Ok(Write::Conflict(found));
        }
        // A record that is deleted and made again never repeats a version.
        let version = self.next_fence()?.get();
        let expires = ttl.map(|ttl| moment(self.now.moment + ttl));
        let row = params![key.as_str(), value, signed(version), ttl.map(span), expires];
        self.change(script::PUT_RECORD, row)?;
        Ok(Write::Written(Version(version)))
    }

    pub fn delete(&mut self, key: &LockName, expect: Expect) -> Result<Delete> {
        match self.record(key)? {
            Some(found) if !expect.met_by(Some(found.version)) => Ok(Delete::Conflict(found)),
            Some(_) => {
                self.change(script::REMOVE_RECORD, [key.as_str()])?;
                Ok(Delete::Deleted)
            }
            None => Ok(Delete::Absent),
        }
    }

    pub fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let (text, from) = match &page.after {
            Some(after) if after.as_str() >= prefix => (script::RECORDS_AFTER, after.as_str()),
            _ => (script::RECORDS_FROM, prefix),
        };
        let mut records = Vec::new();
        let mut statement = self.sql.prepare_cached(text).map_err(fault)?;
        let mut rows = statement.query(params![from, moment(self.now.moment)]).map_err(fault)?;
        while let Some(row) = rows.next().map_err(fault)? {
            let record = rows::record(row).map_err(fault)?;
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
