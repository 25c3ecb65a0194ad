use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use lockkeeper_core::{Delete, Expect, LockName, Page, Record, RecordPage, Records, Result, Version, Write};
use redis::{Value, cmd};

use crate::hold::{millis, odd};
use crate::script::{Call, WRITE};
use crate::store::{RedisStore, Shared};

impl Shared {
    fn record_key(&self, key: &LockName) -> String {
        format!("{}record:{}", self.layout.base(self.layout.group(key)), self.layout.key(key))
    }

    async fn record(&self, key: &LockName) -> Result<Option<Record>> {
        let slot = self.layout.group(key).slot();
        match self.fleet.call(slot, cmd("GET").arg(self.record_key(key))).await? {
            Value::Nil => Ok(None),
            Value::BulkString(text) => read(key, &text).map(Some),
            _ => Err(odd()),
        }
    }

    /// Writes or deletes. `Ok(Ok(n))`: done, and this is the new version or how many there were.
    async fn change(
        &self,
        key: &LockName,
        expect: Expect,
        ttl: u64,
        verb: &str,
        value: &[u8],
    ) -> Result<Result<u64, Option<Record>>> {
        let group = self.layout.group(key);
        let expect = match expect {
            Expect::Absent => "absent".to_owned(),
            Expect::Any => "any".to_owned(),
            Expect::Version(Version(version)) => format!("{version:016}"),
        };
        let keys = [format!("{}fence", self.layout.base(group)), self.record_key(key)];
        let call = Call::new(&WRITE, &keys).arg(expect).arg(ttl).arg(self.floor()).arg(verb).arg(value);
        let Value::Array(answer) = call.run(&self.fleet, group.slot()).await? else { return Err(odd()) };
        match &answer[..] {
            [Value::Int(1), Value::Int(n)] => Ok(Ok(u64::try_from(*n).map_err(|_| odd())?)),
            [Value::Int(0), Value::BulkString(text)] if text.is_empty() => Ok(Err(None)),
            [Value::Int(0), Value::BulkString(text)] => Ok(Err(Some(read(key, text)?))),
            _ => Err(odd()),
        }
    }
}

fn read(key: &LockName, text: &[u8]) -> Result<Record> {
    let (version, value) = text.split_at_checked(16).ok_or_else(odd)?;
    let version = std::str::from_utf8(version).ok().and_then(|digits| digits.parse().ok()).ok_or_else(odd)?;
    Ok(Record { key: key.clone(), value: value.to_vec(), version: Version(version) })
}

#[async_trait]
impl Records for RedisStore {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.shared.record(key).await
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        Record::check(value, ttl)?;
        match self.shared.change(key, expect, ttl.map_or(0, millis), "write", value).await? {
            Ok(version) => {
                self.shared.floor.fetch_max(version, Ordering::Relaxed);
                Ok(Write::Written(Version(version)))
            }
            Err(found) => Ok(Write::Conflict(found)),
        }
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        Ok(match self.shared.change(key, expect, 0, "delete", b"").await? {
            Ok(0) | Err(None) => Delete::Absent,
            Ok(_) => Delete::Deleted,
            Err(Some(found)) => Delete::Conflict(found),
        })
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let mut keys: Vec<LockName> = self.shared.find("record", prefix, page).await?.into_iter().collect();
        let more = keys.len() > page.size();
        keys.truncate(page.size());
        let next = if more { keys.last().cloned() } else { None };
        let records = try_join_all(keys.iter().map(|key| self.shared.record(key))).await?;
        Ok(RecordPage { records: records.into_iter().flatten().collect(), next })
    }
}
