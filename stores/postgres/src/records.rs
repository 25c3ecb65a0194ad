//! Records: reading, writing, deleting and scanning them.

use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{
    DeleteOutcome, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, WriteOutcome,
};
use tokio_postgres::Row;

use crate::codec::{micros, unexpected_reply};
use crate::session::{Param, first};
use crate::statements::{PUT_RECORD, READ_RECORD, SCAN_RECORDS};
use crate::store::PostgresStore;

impl PostgresStore {
    /// Writes a record, or deletes it if there is no value. `Ok(Ok(version))`: done; `Ok(Err(found))`: the expectation was not met.
    async fn put(
        &self,
        key: &LockName,
        value: Option<&[u8]>,
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Result<Version, Option<Record>>> {
        let expect = match expect {
            Expect::Any => -2,
            Expect::Absent => -1,
            Expect::Version(Version(version)) => i64::try_from(version).unwrap_or(i64::MAX),
        };
        let params: [Param<'_>; 4] = [&key.as_str(), &value, &expect, &ttl.map(micros)];
        let rows = self.parts.connection.rows(&PUT_RECORD, &params).await?;
        Ok(match first::<Option<i64>>(&rows, 0)? {
            Some(version) => Ok(self::version(version)?),
            None => Err(match first::<Option<i64>>(&rows, 2)? {
                Some(version) => Some(Record {
                    key: key.clone(),
                    value: first(&rows, 1)?,
                    version: self::version(version)?,
                }),
                None => None,
            }),
        })
    }
}

fn version(number: i64) -> Result<Version> {
    u64::try_from(number).map(Version).map_err(|_| unexpected_reply())
}

fn record(key: LockName, row: &Row, at: usize) -> Result<Record> {
    let number = row.try_get(at + 1).map_err(|_| unexpected_reply())?;
    Ok(Record { key, value: row.try_get(at).map_err(|_| unexpected_reply())?, version: version(number)? })
}

#[async_trait]
impl Records for PostgresStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let rows = self.parts.connection.rows(&READ_RECORD, &[&key.as_str()]).await?;
        rows.first().map(|row| record(key.clone(), row, 0)).transpose()
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        Record::check(value, ttl)?;
        Ok(match self.put(key, Some(value), expect, ttl).await? {
            Ok(version) => WriteOutcome::Written(version),
            Err(found) => WriteOutcome::Conflict(found),
        })
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        Ok(match self.put(key, None, expect, None).await? {
            Ok(_) => DeleteOutcome::Deleted,
            Err(None) => DeleteOutcome::Absent,
            Err(Some(found)) => DeleteOutcome::Conflict(found),
        })
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let after = page.after.as_ref().map_or("", LockName::as_str);
        let wanted = page.size() as i64 + 1;
        let rows = self.parts.connection.rows(&SCAN_RECORDS, &[&prefix, &after, &wanted]).await?;
        let found = rows.iter().take(page.size()).map(|row| {
            record(LockName::new(row.try_get::<_, &str>(0).map_err(|_| unexpected_reply())?)?, row, 1)
        });
        let records: Vec<Record> = found.collect::<Result<_>>()?;
        let next = if rows.len() > page.size() { records.last().map(|last| last.key.clone()) } else { None };
        Ok(RecordPage { records, next })
    }
}
