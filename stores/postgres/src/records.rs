use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::{Delete, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, Write};
use tokio_postgres::Row;

use crate::entry::{micros, odd};
use crate::link::first;
use crate::script::{PUT, READ, SCAN};
use crate::store::PostgresStore;

impl PostgresStore {
    /// Writes, or deletes without a value. `Ok(Ok(n))`: done, and this is the new version.
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
        let params: [crate::link::Param<'_>; 4] = [&key.as_str(), &value, &expect, &ttl.map(micros)];
        let rows = self.shared.link.rows(&PUT, &params).await?;
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
    u64::try_from(number).map(Version).map_err(|_| odd())
}

fn record(key: LockName, row: &Row, at: usize) -> Result<Record> {
    let number = row.try_get(at + 1).map_err(|_| odd())?;
    Ok(Record { key, value: row.try_get(at).map_err(|_| odd())?, version: version(number)? })
}

#[async_trait]
impl Records for PostgresStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let rows = self.shared.link.rows(&READ, &[&key.as_str()]).await?;
        rows.first().map(|row| record(key.clone(), row, 0)).transpose()
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        Record::check(value, ttl)?;
        Ok(match self.put(key, Some(value), expect, ttl).await? {
            Ok(version) => Write::Written(version),
            Err(found) => Write::Conflict(found),
        })
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        Ok(match self.put(key, None, expect, None).await? {
            Ok(_) => Delete::Deleted,
            Err(None) => Delete::Absent,
            Err(Some(found)) => Delete::Conflict(found),
        })
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let after = page.after.as_ref().map_or("", LockName::as_str);
        let wanted = page.size() as i64 + 1;
        let rows = self.shared.link.rows(&SCAN, &[&prefix, &after, &wanted]).await?;
        let found = rows
            .iter()
            .take(page.size())
            .map(|row| record(LockName::new(row.try_get::<_, &str>(0).map_err(|_| odd())?)?, row, 1));
        let records: Vec<Record> = found.collect::<Result<_>>()?;
        let next = if rows.len() > page.size() { records.last().map(|last| last.key.clone()) } else { None };
        Ok(RecordPage { records, next })
    }
}
